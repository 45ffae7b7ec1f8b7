"""Calls over channels that are launched again without checks and plan give the results of the planned ones."""

import fusednorm
import pytest
import torch
from fusednorm.devices.device_properties import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")

SHAPES = ((2, 8, 3, 4), (2, 16, 3, 4), (2, 1, 3, 4), (2, 8, 1, 1), (2, 16, 1, 1), (3, 8, 3, 4))


def make_samples(shape, memory_format):
    return torch.randn(shape).to(memory_format=memory_format)


@pytest.mark.parametrize(
    ("makes_natively", "memory_format"),
    [(False, torch.contiguous_format), (True, torch.contiguous_format), (True, torch.channels_last)],
)
def test_each_shape_and_layout_is_a_kind_of_its_own(makes_natively, memory_format, request):
    replaying = request.getfixturevalue("natively" if makes_natively else "replaying")
    replaying.runs = True
    for shape in SHAPES:
        planned = run(make_samples(shape, memory_format))
        replaying.launched.clear()
        x = make_samples(shape, memory_format)
        found = run(x)
        assert replaying.launched, shape
        for got, of_plan in zip(found, planned, strict=True):
            assert got.stride() == of_plan.stride(), shape
        rows = x.movedim(1, -1)
        right = torch.nn.functional.layer_norm(rows, rows.shape[-1:]).movedim(-1, 1)
        torch.testing.assert_close(found[0], right)


def test_rows_of_the_same_tensor_are_another_kind(replaying):
    replaying.runs = True
    x = torch.randn(2, 4, 4)
    for layout in ("nchw", None, "nchw", None):
        y = fusednorm.layer_norm_forward(x, layout=layout).y
        axis = -1 if layout is None else 1
        torch.testing.assert_close(y.mean(axis), torch.zeros(2, 4))
    assert replaying.launched


def run(x):
    result = fusednorm.layer_norm_forward(x, layout="nchw", stats=True)
    dy = torch.ones_like(x)
    gradients = fusednorm.layer_norm_backward(dy, x, mean=result.mean, rstd=result.rstd, layout="nchw")
    return result.y, result.mean, gradients.dx
