"""What the compiler makes of LayerNorm's configurations for sm_90, without a GPU: no spills, 128-bit accesses."""

import json

import pytest

from tests.kernels.compiled import compile_elsewhere

# A length of every table entry and of the sweep, among them lengths that leave lanes of a tile empty.
COLS = (64, 128, 256, 512, 768, 1024, 2048, 2560, 4096, 5120, 8192, 14336, 16384, 32768)
# Lengths at which the heaviest variant compiles as well.
FUSED_COLS = (256, 1024, 8192, 32768)

COMPILE = """
import json, sys
import torch
from fusednorm import layer_norm_plan
from fusednorm.checks import Epilogue
from fusednorm.inspection import inspect
from fusednorm.results import Backward, Forward

dtype = getattr(torch, sys.argv[1])
plain, fused = json.loads(sys.argv[2])
done, reports = set(), []
for cols, activation in [(cols, "none") for cols in plain] + [(cols, "silu") for cols in fused]:
    x, w, statistic = (
        torch.empty(shape, dtype=d, device="meta")
        for shape, d in (((4096, cols), dtype), ((cols,), dtype), ((4096,), torch.float32))
    )
    fused = activation == "silu"
    residual = x if fused else None
    after, offset = Epilogue(activation), {"weight_offset": float(fused)}
    out = Forward(x, residual_out=residual)
    plan = layer_norm_plan.plan_forward(x, w, w, 1e-5, residual, after, out, False, **offset)
    plan += layer_norm_plan.plan_backward(
        x, x, w, w, 1e-5, statistic, statistic, residual, None, after, Backward(x, w, w), False, **offset
    )
    for launch in plan:
        key = launch.kernel.fn.__name__, tuple(sorted(launch.options.items()))
        if key not in done:
            done.add(key)
            report = inspect(launch)
            widest = {kind: max(widths, default=0) for kind, widths in report.access_bytes.items()}
            reports.append((*key, report.spilled_bytes, report.registers, report.shared_bytes, widest))
print(json.dumps(reports))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_configurations_do_not_spill_and_access_128_bits(dtype):
    reports = compile_elsewhere(COMPILE, dtype, json.dumps([COLS, FUSED_COLS]))
    assert len(reports) > 20
    for kernel, options, spilled, registers, shared, widest in reports:
        what = f"{kernel} {options}: {registers} registers, {spilled} bytes spilled, {shared} shared, {widest}"
        assert spilled == 0, what
        assert shared <= 227 << 10, what
        if "fold" not in kernel:
            assert max(widest["ld"], widest["cp"]) == 16, what
        if "fold" not in kernel and "rows" not in kernel:
            assert widest["st"] == 16, what
