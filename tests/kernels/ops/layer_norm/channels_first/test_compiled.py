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
from fusednorm.ops.layer_norm.channels_first.choices import plan_backward, plan_forward
from fusednorm.ops.layer_norm.checks import view_as_positions
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_as_array

dtype, residual = getattr(torch, sys.argv[1]), len(sys.argv) > 2
itemsize = dtype.itemsize
reports = []
for positions in (3136, 196, 49):
    access = max(tables.NARROWEST, itemsize * min(16 // itemsize, positions & -positions))
    for kind, table in (("forward", tables.FORWARD), ("backward", tables.BACKWARD)):
        for limit, _ in table[itemsize, access]:
            channels = limit
            def describe(name, like_x, shape=None, of=torch.float32):
                shape = (8, channels, positions) if like_x else shape
                array = describe_as_array(name, torch.empty(shape, dtype=dtype if like_x else of, device="meta"))
                return view_as_positions(array) if like_x else array
            w = describe("weight", False, (channels,), dtype)
            statistics = [describe(name, False, (8, positions)) for name in ("mean", "rstd")]
            given = dict(x=describe("x", True), weight=w, bias=w, options=NormOptions("layer_norm"))
            if residual:
                given["residual"] = describe("residual", True)
            if kind == "forward":
                residual_out = describe("residual_out", True) if residual else None
                out = Forward(describe("y", True), *statistics, residual_out)
                plan = plan_forward(LayerNormForwardCall(**given, out=out))
            else:
                dx = describe("dx", True)
                out = Backward(dx, w, w, dx if residual else None)
                saved = dict(zip(("mean", "rstd"), statistics))
                if residual:
                    saved["dresidual_out"] = describe("dresidual_out", True)
                plan = plan_backward(LayerNormBackwardCall(dy=describe("dy", True), **given, **saved, out=out))
            report = inspect_launch(plan[0])
            widest = max(max(report.access_bytes["ld"]), max(report.access_bytes["cp"], default=0))
            loads = sum(report.access_bytes["ld"].values()) + sum(report.access_bytes["cp"].values())
            counts = plan[0].options.get("CHUNKS"), report.spilled_bytes
            reports.append((kind, positions, channels, widest, loads, *counts))
print(json.dumps(reports))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_configurations_access_whole_vectors_and_load_a_parameter_once(dtype):
    reports = compile_elsewhere(COMPILE, dtype)
    assert len(reports) > 20
    for report in reports:
        kind, positions, _, widest, loads, chunks, spilled = report
        assert spilled <= 64, report
        if positions == 3136:
            assert widest == 16, report
            # x, dy, weight and bias of each chunk, in stages, and statistics.
            assert loads <= 8 * chunks + 8 * (kind == "backward"), report
        elif positions == 196:
            assert widest >= (8 if dtype == "bfloat16" else 16), report


@pytest.mark.slow
def test_a_residual_spills_as_little():
    reports = compile_elsewhere(COMPILE, "bfloat16", "residual")
    assert len(reports) > 20
    assert max(spilled for *_, spilled in reports) <= 64
