"""Real samples whose mean is many standard deviations from zero, by the algorithms that a GPU chooses for them."""

import pytest
import torch
from fusednorm import allow_waiting

from tests.kernels.ops.group_norm.cases import channels_last
from tests.kernels.ops.group_norm.far_from_zero import check_forward

pytestmark = pytest.mark.gpu

MOST_UNITS = 24
"""More than on small samples: a thread adds up more values."""

SHAPES = [
    ((1, 320, 8, 8), 32),
    ((1, 32, 20, 20), 4),
    ((2, 640, 32, 32), 32),
    ((2, 1280, 16, 16), 32),
    ((8, 512, 64, 64), 32),
    ((1, 512, 128, 128), 32),
    ((3, 80, 61, 67), 8),
    ((2, 5120, 12, 12), 32),
    ((70, 64, 8, 8), 4),
    ((1, 16, 500, 500), 1),
]


@pytest.fixture(params=[True, False], ids=["programs wait", "nothing waits"])
def waits(request):
    allow_waiting(request.param)
    yield request.param
    allow_waiting(True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_statistics_and_y_do_not_depend_on_the_distance_from_zero(shape, groups, mean, last, waits, device):
    check_forward(shape, groups, mean, last, device, MOST_UNITS)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), SHAPES[:4])
def test_with_a_residual_of_the_other_layout_neither(shape, groups, last, device):
    residual = torch.zeros(shape, device=device)
    residual = residual if last else channels_last(residual)
    for mean in (1e3, 1e6):
        check_forward(shape, groups, mean, last, device, MOST_UNITS, residual=residual)
