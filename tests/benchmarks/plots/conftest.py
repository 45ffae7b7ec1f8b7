import pytest

from benchmarks.workload.benchmark_cells import KernelCell

SHAPES = ((2, 320, 64, 64), (8, 512, 64, 64), (1, 128, 20, 256, 256))


@pytest.fixture
def path(write_csv):
    """Three shapes in both layouts, two shapes of another variant, and rows."""
    silu = [
        KernelCell("group_norm", "forward", "silu", shape, 32, "bfloat16", layout)
        for shape in SHAPES
        for layout in ("nchw", "nhwc")
    ]
    plain = [KernelCell("group_norm", "forward", "plain", shape, 32, "bfloat16", "nchw") for shape in SHAPES[:2]]
    rows = [KernelCell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")]
    providers = {"copy": 1.0, "fusednorm": 0.9, "torch": 0.1, "compile": 0.4}
    return write_csv(*((c, name, value) for c in silu + plain + rows for name, value in providers.items()))
