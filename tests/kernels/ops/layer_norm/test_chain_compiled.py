"""What the compiler makes of chains of LayerNorms for sm_90, without a GPU: rows in registers, 128-bit accesses."""

import json

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

# (columns, norms): a length of each kind of tile and the sweep, the longest chain among them.
CHAINS = (
    *((64, 2), (256, 4), (768, 2), (1024, 3), (1024, 8), (2560, 2), (4096, 2), (7168, 2), (8192, 2), (16384, 4)),
    *((32768, 1), (32768, 2), (32768, 3), (32768, 4)),
)

COMPILE = """
import json, sys
import torch
from fusednorm.launch.inspection import inspect_launch
from fusednorm.ops.layer_norm.chain import ChainCall
from fusednorm.ops.layer_norm.choices import plan_chain
from tests.kernels.harness.arrays import make

dtype = getattr(torch, sys.argv[1])
reports = []
for cols, norms in json.loads(sys.argv[2]):
    x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((4096, cols), (cols,)))
    # Some parameters are absent: Triton 3.6 does not take None everywhere in a tuple.
    weights, biases = (tuple(None if i % 3 == absent else w for i in range(norms)) for absent in (2, 1))
    (launch,) = plan_chain(make(ChainCall, x, weights, biases, 1e-5, x))
    report = inspect_launch(launch)
    widest = {kind: max(widths, default=0) for kind, widths in report.access_bytes.items()}
    what = f"{report.kernel} {cols} {norms} {dict(launch.options)} {report}"
    reports.append((what, report.spilled_bytes, report.shared_bytes, widest))
print(json.dumps(reports))
"""


# One that is held and one that is swept.
SOME = ((1024, 3), (32768, 2))


@pytest.mark.parametrize(
    ("dtype", "chains"),
    [
        ("bfloat16", SOME),
        pytest.param("bfloat16", CHAINS, marks=pytest.mark.slow),
        pytest.param("float32", CHAINS, marks=pytest.mark.slow),
    ],
)
def test_rows_stay_in_registers_and_are_accessed_128_bits_at_a_time(dtype, chains):
    for what, spilled, shared, widest in compile_elsewhere(COMPILE, dtype, json.dumps(chains)):
        # The assembler gives up a few registers where that makes room for another program on a multiprocessor.
        assert spilled <= 32, what
        assert shared <= 512, what
        assert widest["ld"] == widest["st"] == 16, what
