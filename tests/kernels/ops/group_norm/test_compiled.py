"""What the compiler makes of GroupNorm's configurations for sm_90, without a GPU: no spills, 128-bit accesses."""

import json

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

# One shape of every launch class and layout, and the odd ones that share their tiles.
SHAPES = [
    ((8, 512, 64, 64), 32),
    ((32, 256, 56, 56), 32),
    ((2, 320, 64, 64), 32),
    ((2, 1280, 16, 16), 32),
    ((1, 512, 128, 128), 32),
    ((64, 256, 8, 8), 32),
    ((4, 64, 32, 32), 64),
]

# What is outside of loops over chunks, stored and read again once a group or block: what finds channels.
SPILLS = {
    "group_norm_nchw_forward_cooperative_kernel": 16,
    "group_norm_nhwc_backward_cooperative_kernel": 16,
}

COMPILE = """
import json, math, sys
import torch
from fusednorm.arguments.options import NormOptions
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape, allocate_statistics
from fusednorm.launch.inspection import inspect_launch
from fusednorm.results import Backward, Forward
from tests.kernels.harness.arrays import make

dtype, shapes, kernels = getattr(torch, sys.argv[1]), json.loads(sys.argv[2]), set(sys.argv[3:])
done, reports = set(), []
for (n, c, *spatial), groups in shapes:
    for channels_last in (False, True):
        sample = SampleShape(groups, c // groups, math.prod(spatial), channels_last)
        x = torch.empty((n, c, *spatial), dtype=dtype, device="meta")
        if channels_last:
            x = torch.empty((n, *spatial, c), dtype=dtype, device="meta").movedim(-1, 1)
        w = torch.empty(c, dtype=dtype, device="meta")
        options = NormOptions("group_norm", groups, activation="silu")
        given = {"x": x, "sample": sample, "affine": AffineParameters(w, w), "options": options}
        plans = plan_forward(make(GroupNormForwardCall, **given, out=Forward(x)))
        saved = allocate_statistics(x, sample)
        for mean, rstd in ((None, None), saved):
            out = Backward(x, w, w)
            plans += plan_backward(make(GroupNormBackwardCall, dy=x, **given, mean=mean, rstd=rstd, out=out))
        for launch in plans:
            absent = tuple(i for i, value in enumerate(launch.arguments) if value is None)
            key = launch.kernel.fn.__name__, tuple(sorted(launch.options.items())), absent
            if key not in done and (key[0] in kernels or not kernels):
                done.add(key)
                report = inspect_launch(launch)
                widest = {kind: max(widths, default=0) for kind, widths in report.access_bytes.items()}
                reports.append((*key, report.spilled_bytes, report.registers, widest))
print(json.dumps(reports))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_chosen_configurations_do_not_spill_and_access_128_bits(dtype):
    # Half as many elements a vector, and otherwise the same algorithms.
    shapes = SHAPES if dtype == "float16" else SHAPES[2:5]
    reports = compile_elsewhere(COMPILE, dtype, json.dumps(shapes))
    assert len(reports) > 15
    for kernel, options, _, spilled, registers, widest in reports:
        what = f"{kernel} {options}: {registers} registers, {spilled} bytes spilled, widest accesses {widest}"
        assert spilled <= SPILLS.get(kernel, 0), what
        if "reduce" not in kernel:
            assert widest["ld"] == 16, what
        if all(part not in kernel for part in ("reduce", "stats", "sums", "moments")):
            assert widest["st"] == 16, what


def test_contiguous_groups_that_start_anywhere_are_read_and_written_in_128_bits():
    shapes = [((2, 240, 61, 67), 8), ((8, 80, 59, 61), 8)]
    wanted = {"group_norm_nchw_forward_cooperative_kernel", "group_norm_nchw_forward_resident_kernel"}
    reports = compile_elsewhere(COMPILE, "bfloat16", json.dumps(shapes), *wanted)
    assert wanted == {kernel for kernel, *_ in reports}
    for kernel, options, _, spilled, registers, widest in reports:
        what = f"{kernel} {options}: {registers} registers, {spilled} bytes spilled, widest accesses {widest}"
        assert spilled == 0, what
        assert widest["ld"] == widest["st"] == 16, what
