"""What the compiler makes of the float8 kernels for sm_90, without a GPU: no spills, x in 128-bit accesses.

y leaves as many elements at a time as one access of x brings, in the same threads: were it otherwise, tiles would
go through shared memory to change hands.
"""

import json

import pytest
from fusednorm.launch.launches import REGISTERS_PER_SM

from tests.kernels.harness.compiled import compile_elsewhere

# A length of every table entry and of both sweeps.
COLS = (
    *(64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
    *(10240, 12288, 14336, 16384, 32768, 131072),
)
# Lengths at which the heaviest variant compiles as well.
FUSED_COLS = (256, 1024, 7168, 16384, 32768, 131072)

COMPILE = """
import json, sys
import torch
from fusednorm.tensors.arrays import FLOAT8
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.inspection import inspect_launch
from fusednorm.ops.layer_norm.call import LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_forward
from fusednorm.results import Forward
from tests.kernels.harness.arrays import make

dtype = getattr(torch, sys.argv[1])
plain, fused = json.loads(sys.argv[2])
reports = []
for cols, activation in [(cols, "none") for cols in plain] + [(cols, "silu") for cols in fused]:
    x, w, y, scale = (
        torch.empty(shape, dtype=d, device="meta")
        for shape, d in (((4096, cols), dtype), ((cols,), dtype), ((4096, cols), FLOAT8), ((4096,), torch.float32))
    )
    residual = x if activation == "silu" else None
    out = Forward(y, residual_out=residual, y_scale=scale)
    options = NormOptions("layer_norm", activation=activation)
    call = make(LayerNormForwardCall, x=x, weight=w, bias=w, residual=residual, options=options, out=out)
    (launch,) = plan_forward(call)
    report = inspect_launch(launch)
    widest = {kind: max(widths, default=0) for kind, widths in report.access_bytes.items()}
    what = f"{report.kernel} {cols} {activation} {dict(launch.options)} {report}"
    registers = report.registers * 32 * launch.options["num_warps"]
    reports.append((what, activation, report.spilled_bytes, report.shared_bytes, registers, widest))
print(json.dumps(reports))
"""


# Some that are held and one that is swept, plain and fused.
SOME = ((1024, 16384, 32768), (1024,))


@pytest.mark.parametrize(
    ("dtype", "vector", "cols"),
    [
        ("bfloat16", 8, SOME),
        pytest.param("bfloat16", 8, (COLS, FUSED_COLS), marks=pytest.mark.slow),
        pytest.param("float32", 4, (COLS, FUSED_COLS), marks=pytest.mark.slow),
    ],
)
def test_chosen_configurations_do_not_spill_access_128_bits_and_leave_registers_to_a_second_program(
    dtype, vector, cols
):
    reports = compile_elsewhere(COMPILE, dtype, json.dumps(cols))
    assert len(reports) == sum(map(len, cols))
    for what, activation, spilled, shared, registers, widest in reports:
        assert spilled == 0, what
        if "tile" in what and activation == "none":
            assert 2 * registers <= REGISTERS_PER_SM, what
        assert shared <= 512, what
        assert widest["ld"] == 16, what
        assert widest["st"] == (vector if activation == "none" else 16), what
