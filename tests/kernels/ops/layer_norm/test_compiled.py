"""What the compiler makes of LayerNorm's configurations for sm_90, without a GPU: no spills, 128-bit accesses.

float16 is as wide as bfloat16 and takes the same configurations; registers and local memory of its kernels are in
the fingerprints (`make fingerprints`).
"""

import json

import pytest
import torch

from tests.kernels.harness.compiled import compile_elsewhere

LENGTHS = {
    # Every table entry's longest row; in float32, whose tiles have half as many columns, some.
    "plain": {"bfloat16": "entries", "float32": (64, 1024, 5120, 16384, 65536)},
    # With a residual, an activation and an offset of the weight.
    "fused": (256, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 12288, 14336, 32768, 65536),
    # With a residual of another dtype than x's.
    "stream": (256, 1024, 8192, 14336),
}

# Bytes that a thread may spill: backward, the wider residual and its gradient fill the last registers; resident
# rows and those that programs share were measured at the number of programs that leaves them just too few.
SPILLED = {"plain": 48, "fused": 64, "stream": 96}

COMPILE = """
import json, sys
import torch
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.inspection import inspect_launch
from fusednorm.results import Backward, Forward
from tests.kernels.harness.arrays import make

dtype = getattr(torch, sys.argv[1])
other = torch.bfloat16 if dtype == torch.float32 else torch.float32
both = tables.FORWARD[dtype.itemsize] + tables.BACKWARD[dtype.itemsize]
entries = sorted({min(limit // 8 * 8, 1 << 20) for limit, _ in both})
cells = [
    (variant, cols)
    for variant, lengths in json.loads(sys.argv[2]).items()
    for cols in (entries if lengths == "entries" else lengths)
]
PLAIN = NormOptions("layer_norm")
done, reports = set(), []
for variant, cols in cells:
    x, stream, w, statistic = (
        torch.empty(shape, dtype=d, device="meta")
        for shape, d in (((4096, cols), dtype), ((4096, cols), other), ((cols,), dtype), ((4096,), torch.float32))
    )
    if "heads" in variant:
        x = torch.empty(4096, 40 * cols, dtype=dtype, device="meta")[:, : 32 * cols].view(4096, 32, cols)
        w = torch.empty((32, cols) if variant == "own heads" else cols, dtype=dtype, device="meta")
    residual = {"fused": x, "stream": stream}.get(variant)
    options = NormOptions("layer_norm", weight_offset=1.0, activation="silu") if variant == "fused" else PLAIN
    given = dict(x=x, weight=w, bias=w, options=options, residual=residual)
    out, gradients = Forward(x, residual_out=residual), Backward(x, w, w, residual if variant == "stream" else x)
    plan = plan_forward(make(LayerNormForwardCall, **given, out=out))
    plan += plan_backward(make(LayerNormBackwardCall, dy=x, **given, mean=statistic, rstd=statistic, out=gradients))
    for step in plan:
        key = variant, step.kernel.fn.__name__, tuple(sorted(step.options.items()))
        if key not in done and "reduce" not in step.kernel.fn.__name__:
            done.add(key)
            report = inspect_launch(step)
            widest = {kind: max(widths, default=0) for kind, widths in report.access_bytes.items()}
            reports.append((*key, report.spilled_bytes, report.registers, report.shared_bytes, widest))
print(json.dumps(reports))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_configurations_do_not_spill_and_access_128_bits(dtype):
    reports = compile_elsewhere(COMPILE, dtype, json.dumps(LENGTHS | {"plain": LENGTHS["plain"][dtype]}))
    assert len(reports) > 30
    for variant, kernel, options, spilled, registers, shared, widest in reports:
        what = f"{variant} {kernel} {options}: {registers} registers, {spilled} spilled, {shared} shared, {widest}"
        assert spilled <= SPILLED.get(variant, 0), what
        assert shared <= 227 << 10, what
        width = 16
        if "backward_tile" in kernel:
            # A thread's share of a block: several blocks with narrower accesses beat a padded one.
            block = dict(options)
            bytes_of_block = block["ROWS"] * block["BLOCK_N"] * getattr(torch, dtype).itemsize
            width = min(16, bytes_of_block // (32 * block["num_warps"]))
        assert max(widest["ld"], widest["cp"]) >= width, what
        if "sums" not in kernel:
            assert widest["st"] >= width, what


# Bytes that a thread may spill in rows that start anywhere, as measured (Triton 3.6 and 3.7; at most 280 with the
# latter): 50257 columns forward in float16, and backward in 16 bits, where eight programs of two warps a
# multiprocessor are faster for RMSNorm and as fast for LayerNorm as six, which spill nothing.
ODD_SPILLED = {"bfloat16": 160, "float16": 300}

COMPILE_ODD = """
import json, re, sys
import torch, triton
from fusednorm.arguments.options import NormOptions
from fusednorm.launch import inspection
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.results import Backward, Forward
from tests.kernels.harness.arrays import make

compiled = []
compile = triton.compile
inspection.triton.compile = lambda *args, **options: compiled.append(compile(*args, **options)) or compiled[-1]
dtype = getattr(torch, sys.argv[1])
reports = []
for cols in (1001, 16385, 50257):
    x, w, statistic = (
        torch.empty(shape, dtype=d, device="meta")
        for shape, d in (((4096, cols), dtype), ((cols,), dtype), ((4096,), torch.float32))
    )
    given = dict(x=x, weight=w, bias=w, options=NormOptions("layer_norm"))
    plan = plan_forward(make(LayerNormForwardCall, **given, out=Forward(x)))
    plan += plan_forward(make(LayerNormForwardCall, **given, residual=x, out=Forward(x, residual_out=x)))
    saved = dict(mean=statistic, rstd=statistic)
    plan += plan_backward(make(LayerNormBackwardCall, dy=x, **given, **saved, out=Backward(x, w, w)))[:1]
    for step in plan:
        report = inspection.inspect_launch(step)
        code = compiled[-1].asm["ttgir"]
        layouts = dict(re.findall(r"(#\\w+) = #ttg.blocked<{sizePerThread = \\[([0-9, ]+)\\]", code))
        of_loads = re.findall(r"tt.load [^\\n]*tensor<[0-9x]*x!tt.ptr<\\w+>, (#\\w+)>", code)
        neighbours = [layouts[layout].split(", ")[-1] for layout in of_loads]
        reports.append((cols, report.kernel, report.spilled_bytes, report.registers, neighbours))
print(json.dumps(reports))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_neighbouring_threads_load_neighbouring_columns_of_odd_rows(dtype):
    reports = compile_elsewhere(COMPILE_ODD, dtype)
    assert len(reports) == 9
    for cols, kernel, spilled, registers, neighbours in reports:
        what = f"{cols} {kernel}: {registers} registers, {spilled} spilled, {neighbours} columns a thread"
        assert spilled <= ODD_SPILLED.get(dtype, 0), what
        assert neighbours, what
        assert set(neighbours) == {"1"}, what


COMPILE_HEADS = """
import json
import torch
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.inspection import inspect_launch
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.results import Backward, Forward
from tests.kernels.harness.arrays import make

tokens, heads, cols = 64, 4, 128
wide = torch.empty(tokens, 3, heads, cols, device="meta")
padded = torch.empty(tokens, heads, 2 * cols, device="meta")[..., :cols]
compiled = []
for x, shape in ((wide[:, 0], (cols,)), (wide[:, 0], (heads, cols)), (padded, (heads, cols))):
    w, y = torch.empty(shape, device="meta"), torch.empty(tokens, heads, cols, device="meta")
    given = dict(x=x, weight=w, bias=w, options=NormOptions("layer_norm"))
    (forward,) = plan_forward(make(LayerNormForwardCall, **given, out=Forward(y)))
    backward, _ = plan_backward(make(LayerNormBackwardCall, dy=x, **given, out=Backward(y, w, w)))
    for launch in (forward, backward):
        compiled.append((launch.options["HEADS"], inspect_launch(launch).spilled_bytes))
print(json.dumps(compiled))
"""


def test_heads_compile_however_they_lie():
    assert compile_elsewhere(COMPILE_HEADS) == [
        [heads, 0] for heads in ("shared", "own", "own_uniform") for _ in range(2)
    ]
