"""Times the forward pass over rows that tiles handle, with the kernels of the source tree first on the path.

    PYTHONPATH=BEFORE/kernels:. python -m benchmarks.kernels.tile_passes --out before.csv --commit COMMIT
    PYTHONPATH=kernels:. python -m benchmarks.kernels.tile_passes --out after.csv

x has 256 MiB, y is preallocated; `bits` is a sum of y's bits, equal if results are.  Alternate between the trees,
with several processes each.
"""

import argparse
from functools import partial

import fusednorm
import torch
from fusednorm import ActivationName

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.timing import DeviceTimer

COLUMNS = ("dtype", "cols", "variant", "ms", "of_copy", "bits")
COLS = (16, 64, 128, 256, 512, 768, 1024, 1536, 3584)
VARIANTS: dict[str, tuple[ActivationName, bool]] = {"plain": ("none", False), "silu stats": ("silu", True)}
_X_BYTES = 256 << 20


def main() -> None:
    """Write a line for each dtype, row length and variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    given = parser.parse_args()
    results = CsvResults(given.out, COLUMNS, given.commit)
    timer = DeviceTimer()
    for dtype in (torch.bfloat16, torch.float32):
        for cols in COLS:
            torch.manual_seed(cols)
            x = torch.randn(_X_BYTES // (cols * dtype.itemsize), cols, dtype=dtype, device="cuda")
            weight, bias = torch.randn(2, cols, dtype=dtype, device="cuda")
            out = fusednorm.Forward(torch.empty_like(x))
            for name, (activation, stats) in VARIANTS.items():
                norm = partial(fusednorm.layer_norm_forward, activation=activation, stats=stats, out=out)
                ms = timer(partial(norm, x, weight, bias), repeats=15).p50
                words = torch.int16 if dtype.itemsize == 2 else torch.int32
                bits = int(out.y.view(words).long().sum())
                copy = timer(partial(out.y.copy_, x), repeats=10).p50
                label = str(dtype).removeprefix("torch.")
                row = (label, cols, name, f"{ms:.5f}", f"{copy / ms:.4f}", bits)
                results.add_row(dict(zip(COLUMNS, row, strict=True)))


if __name__ == "__main__":
    main()
