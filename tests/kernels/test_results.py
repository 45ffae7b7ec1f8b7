"""The results of passes: the old name of a field."""

import fusednorm
import pytest
import torch
from fusednorm.results import Forward


def test_the_old_name_of_y_scale_warns():
    result = fusednorm.reference.layer_norm_forward(torch.randn(2, 8), out_dtype=torch.float8_e4m3fn)
    with pytest.warns(DeprecationWarning, match="y_scale") as caught:
        assert result.scale is result.y_scale
    assert caught[0].filename == __file__


@pytest.mark.parametrize("make", [Forward, Forward(torch.zeros(2, 8))._replace])
def test_y_scale_may_be_passed_by_its_old_name(make):
    y, scale = torch.zeros(2, 8), torch.zeros(2)
    with pytest.warns(DeprecationWarning, match="y_scale") as caught:
        result = make(y=y, scale=scale)
    assert result.y_scale is scale
    assert caught[0].filename == __file__


def test_the_name_y_scale_does_not_warn(recwarn):
    assert Forward(1, y_scale=2)._replace(y_scale=3).y_scale == 3
    assert not recwarn.list
