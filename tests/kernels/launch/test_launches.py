"""Grids of launches: CUDA takes up to 2^31 - 1 programs along their first axis, and 65,535 along the others."""

import json

import pytest
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch.launches import Launch

from tests.kernels.harness.compiled import compile_elsewhere

FIRST, OTHERS = 2**31 - 1, 65535

# Calls with many samples, channels, rows or heads; each is planned in all ways that change its launches.
GRIDS = """
import json, sys
from itertools import product
import torch
import fusednorm
from fusednorm.devices.device_properties import H200
from fusednorm.launch.recorded_launches import recording_launches

def new(*shape, last=False):
    if last:
        return new(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

def group_norms(shape, groups):
    n, c, *_ = shape
    weight, both = new(c), new(n, 2 * c)
    scale, shift = both.chunk(2, 1)
    for last, other, fused, adaptive in product((False, True), (False, True), (False, True), (False, True)):
        x = new(*shape, last=last)
        options = {"residual": new(*shape, last=last != other)} if fused else {}
        if adaptive:
            options |= {"scale": scale, "shift": shift}
        fusednorm.group_norm_forward(x, groups, weight, weight, stats=True, **options)
        fusednorm.group_norm_backward(new(*shape, last=last != other), x, groups, weight, weight, **options)

def layer_norms(shape, parameters):
    x, weight = new(*shape), new(*parameters)
    for options in ({}, {"residual": new(*shape)}):
        fusednorm.layer_norm_forward(x, weight, weight, stats=True, **options)
        fusednorm.layer_norm_backward(x, x, weight, weight, **options)

grids = {}
for waits in (True, False):
    fusednorm.allow_waiting(waits)
    for call, *arguments in json.loads(sys.argv[1]):
        with recording_launches(H200) as launches:
            globals()[call](*arguments)
            for launch in launches:
                grids.setdefault(launch.kernel.fn.__name__, []).append(launch.grid)
print(json.dumps(grids))
"""
MANY = [
    ("group_norms", (70000, 4), 2),
    ("group_norms", (70000, 96, 3, 3), 32),
    ("group_norms", (70000, 64, 40, 40), 32),
    ("group_norms", (70000, 8, 300, 300), 1),
    ("group_norms", (2, 1 << 20, 2), 1 << 19),
    ("group_norms", (2, 1 << 20, 2), 2),
    ("group_norms", (3, 70000 * 8, 40), 70000),
    *(("layer_norms", (1 << 20, cols), (cols,)) for cols in (16, 4096, 32768, 1 << 20)),
    *(("layer_norms", (70000, 3, cols), (3, cols)) for cols in (16, 4096)),
    *(("layer_norms", (3, 65535, cols), (65535, cols)) for cols in (16, 4096)),
]


def test_grids_of_calls_with_many_samples_groups_rows_or_heads_are_within_limits():
    grids = compile_elsewhere(GRIDS, json.dumps(MANY))
    assert len(grids) > 20
    for kernel, of_kernel in grids.items():
        for first, *others in of_kernel:
            assert 1 <= first <= FIRST, f"{kernel} has {first} programs along the first axis"
            assert all(1 <= size <= OTHERS for size in others), f"{kernel} has a grid of {first}, {others}"


@pytest.mark.parametrize("grid", [(FIRST + 1,), (1, OTHERS + 1), (1, 1, OTHERS + 1)])
def test_a_grid_beyond_the_limits_is_refused(grid):
    with pytest.raises(UnsupportedShapeError, match=r"2147483647, 65535 and 65535"):
        Launch(None, grid, (), {})
    Launch(None, (FIRST, OTHERS, OTHERS), (), {})


def test_a_call_that_needs_too_many_programs_is_refused_before_it_launches():
    script = """
import json, torch, fusednorm
from fusednorm.devices.device_properties import H200
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch.recorded_launches import recording_launches
x = torch.empty(1 << 26, 2, 32, dtype=torch.bfloat16, device="meta").movedim(-1, 1)
with recording_launches(H200) as launches:
    try:
        fusednorm.group_norm_forward(x, 32)
    except UnsupportedShapeError as error:
        print(json.dumps([str(error), len(launches)]))
"""
    message, launches = compile_elsewhere(script)
    assert "2147483648" in message
    assert launches == 0
