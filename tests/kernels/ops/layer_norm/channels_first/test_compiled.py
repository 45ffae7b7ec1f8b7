"""Results of the compiler for the tables' configurations over channels on sm_90, without a GPU."""

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

COMPILE = """
import json, sys
import torch
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.inspection import inspect_launch
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.checks import view_as_positions
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_as_array

dtype, has_residual = getattr(torch, sys.argv[1]), sys.argv[2] == "residual"
itemsize = dtype.itemsize

def describe(name, shape, of=dtype):
    array = describe_as_array(name, torch.empty(shape, dtype=of, device="meta"))
    return view_as_positions(array) if len(shape) == 3 else array

def plan(kind, channels, positions):
    size = (8, channels, positions)
    weight = describe("weight", (channels,))
    mean, rstd = (describe(name, (8, positions), torch.float32) for name in ("mean", "rstd"))
    given = dict(x=describe("x", size), weight=weight, bias=weight, options=NormOptions("layer_norm"))
    if has_residual:
        given["residual"] = describe("residual", size)
    if kind == "forward":
        residual_out = describe("residual_out", size) if has_residual else None
        out = Forward(describe("y", size), mean, rstd, residual_out)
        return plan_forward(LayerNormForwardCall(**given, out=out))
    saved = dict(dy=describe("dy", size), mean=mean, rstd=rstd)
    if has_residual:
        saved["dresidual_out"] = describe("dresidual_out", size)
    dx = describe("dx", size)
    out = Backward(dx, weight, weight, dx if has_residual else None)
    return plan_backward(LayerNormBackwardCall(**given, **saved, out=out))

done, reports = set(), []
for positions in (3136, 196, 49):
    access = max(tables.NARROWEST, itemsize * min(16 // itemsize, positions & -positions))
    for kind, table in (("forward", tables.FORWARD), ("backward", tables.BACKWARD)):
        limits = [limit for limit, _ in table[itemsize, access]]
        for channels in (*limits, 2 * limits[-1]):
            for launch in plan(kind, channels, positions):
                key = launch.kernel.fn.__name__, tuple(sorted(launch.options.items()))
                if key not in done:
                    done.add(key)
                    report = inspect_launch(launch)
                    loads = report.access_bytes["ld"] + report.access_bytes["cp"]
                    widest = max(loads), max(report.access_bytes["st"])
                    counts = sum(loads.values()), launch.options.get("CHUNKS"), report.spilled_bytes
                    reports.append((report.kernel, positions, channels, *widest, *counts))
print(json.dumps(reports))
"""

# Bytes that a thread may spill: most where float32 with a residual is read in accesses of one element.
SPILLED = {("float32", "residual", 49): 184}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["plain", "residual"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_configurations_access_whole_vectors_and_load_a_parameter_once(dtype, variant):
    reports = compile_elsewhere(COMPILE, dtype, variant)
    assert len(reports) > 20
    narrower = 8 if dtype == "bfloat16" else 16
    for report in reports:
        kernel, positions, _, loaded, stored, loads, chunks, spilled = report
        assert spilled <= SPILLED.get((dtype, variant, positions), 64), report
        width = {3136: 16, 196: narrower}.get(positions, 4)
        if "reduce" not in kernel:
            assert loaded >= width or positions == 49, report
            # Sums of channels are stored one by one.
            assert stored >= width or "sums" in kernel, report
        if variant == "plain" and positions == 3136 and chunks:
            # x, dy, weight and bias of each chunk, in stages, and statistics.
            assert loads <= 8 * chunks + 8 * ("backward" in kernel), report
