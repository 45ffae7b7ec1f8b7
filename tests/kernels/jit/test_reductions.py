"""Sums over lanes, compiled for sm_90 without a GPU: every lane gets the same sum."""

import json

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

ADDENDS = """
import json, re, sys
import torch, triton
from dataclasses import replace
from benchmarks.fingerprints import group_norm_cases, layer_norm_cases
from benchmarks.fingerprints.cases import plan_case
from fusednorm.launch.inspection import SM_90, specialise_kernel
from fusednorm.ops.group_norm.sample_shape import SampleShape

SHUFFLE = re.compile(r"shfl\\.sync\\S* *\\t*(%\\w+)")
MOVE = re.compile(r"mov\\.b32 *\\t*(%\\w+), (%\\w+);")
FMA = re.compile(r"fma\\.rn\\.f32 *\\t*%\\w+, %\\w+, %\\w+, (%\\w+);")

def shuffled_addends(ptx):
    shuffled, count = set(), 0
    for line in ptx.splitlines():
        if match := SHUFFLE.search(line):
            shuffled.add(match[1])
        elif (match := MOVE.search(line)) and match[2] in shuffled:
            shuffled.add(match[1])
        elif match := FMA.search(line):
            count += match[1] in shuffled
    assert shuffled, "no sum over lanes"
    return count

def case(operation, kind, dtype, shape, variant, waits):
    module = {"layer_norm": layer_norm_cases, "group_norm": group_norm_cases}[operation]
    size = shape if operation == "layer_norm" else SampleShape(*shape)
    return module.make_case(kind, getattr(torch, dtype), size, replace(module.PLAIN, **variant), waits)

found = []
for kernel, call in json.loads(sys.argv[1]):
    [launch] = [each for each in plan_case(case(*call)).launches if each.kernel.fn.__name__ == kernel]
    specialised = specialise_kernel(launch)
    ptx = triton.compile(specialised.source, SM_90, specialised.options).asm["ptx"]
    found.append([kernel, shuffled_addends(ptx)])
print(json.dumps(found))
"""

OFFSET = {"unaligned": True}
RMS = {"is_rms": True, "bias": False}

# Unaligned tensors and short odd rows, whose vectors several threads hold, and lanes that are multiplied before
# they are added up.
KERNELS = {
    "group_norm": [
        ("group_norm_nchw_backward_cooperative_kernel", "backward", "float32", (2, 40, 256, False), OFFSET, True),
        ("group_norm_nchw_backward_split_sums_kernel", "backward", "float32", (1, 10, 1023, False), OFFSET, False),
        ("group_norm_nchw_backward_tile_kernel", "backward", "float32", (2, 8, 49, False), OFFSET, False),
        ("group_norm_nchw_forward_split_moments_kernel", "backward", "float32", (2, 40, 256, False), OFFSET, False),
        ("group_norm_nchw_forward_tile_kernel", "forward", "float32", (2, 8, 8, False), OFFSET, False),
        ("group_norm_nhwc_backward_stream_sums_kernel", "backward", "float32", (1, 1, 1, True), {}, False),
        ("group_norm_nhwc_backward_cooperative_kernel", "backward", "float32", (1, 8, 1, True), {}, True),
        ("group_norm_nhwc_forward_stream_moments_kernel", "forward", "float32", (1, 10, 1023, True), OFFSET, False),
    ],
    "layer_norm": [
        ("layer_norm_forward_tile_kernel", "forward", "float32", 15, RMS | {"rows": 3}, False),
        ("layer_norm_forward_channels_first_tile_kernel", "forward", "float32", 3, RMS | {"positions": 49}, False),
        ("layer_norm_forward_tile_kernel", "forward", "float32", 15, {"rows": 3}, False),
        ("layer_norm_forward_channels_first_tile_kernel", "forward", "float32", 3, {"positions": 49}, False),
        ("layer_norm_backward_channels_first_tile_kernel", "backward", "float32", 3, {"positions": 49}, False),
        ("layer_norm_backward_tile_kernel", "backward", "float32", 15, {"rows": 3}, False),
        ("layer_norm_backward_tile_kernel", "backward", "float32", 15, OFFSET, False),
        ("layer_norm_forward_sweep_kernel", "backward", "bfloat16", 65535, OFFSET, True),
        ("layer_norm_forward_resident_kernel", "forward", "float32", 5120, OFFSET, False),
    ],
}


@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", KERNELS)
def test_no_lane_adds_an_unrounded_product_to_the_value_of_another_lane(operation, count):
    calls = [(kernel, (operation, *call)) for kernel, *call in KERNELS[operation][:count]]
    found = compile_elsewhere(ADDENDS, json.dumps(calls))
    assert found == [[kernel, 0] for kernel, _ in calls]
