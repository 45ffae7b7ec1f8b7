"""Times every plausible launch configuration of a GroupNorm pass, the basis of its launch tables.

    python -m benchmarks.tune.group_norm --out tune.csv [--pass forward] [--shape 8x512x64x64] [--layout nchw]

Each configuration must agree with torch in float32 before it is timed; a failed one is in the file with its error.
32 groups, SiLU after the norm.  A cell is written when it is done, and its best configurations are printed.
"""

import argparse
import time

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.worker_pool import run_in_workers
from benchmarks.tune.group_norm.trials import (
    COLUMNS,
    GroupNormTuningCell,
    TuningItem,
    compile_cells,
    select_distinct_kernels,
    time_item,
)
from benchmarks.workload.cell_suites import PASSES

LAYOUTS = ("nchw", "nhwc")

SHAPES = (
    (8, 512, 64, 64),
    (2, 960, 128, 128),
    (4, 128, 512, 512),
    (32, 256, 56, 56),
    (1, 128, 20, 256, 256),
    (16, 320, 64, 64),
    (4, 256, 256, 256),
    (1, 128, 1024, 1024),
    (2, 640, 32, 32),
    (2, 320, 64, 64),
    (1, 512, 128, 128),
    (2, 1280, 16, 16),
)
"""The shapes of the targets; one of each class first."""

_COMPILING = 0.5
"""Maximum fraction of a run's time."""

_LONGEST_CELL = 60.0
"""Seconds after which a cell that was begun in time is stopped."""


def main() -> None:
    arguments = _parse_arguments()
    shapes = (
        [tuple(map(int, shape.split("x"))) for shape in arguments.shape.split(",")] if arguments.shape else SHAPES
    )
    cells = [
        GroupNormTuningCell(pass_, shape, layout, dtype)
        for pass_ in arguments.passes.split(",")
        for dtype in arguments.dtype.split(",")
        for shape in shapes
        for layout in arguments.layout.split(",")
    ]
    work = {cell: list(cell.iterate_configs(arguments.only)) for cell in cells}
    latest = time.monotonic() + arguments.seconds
    cells = compile_cells(select_distinct_kernels(work), arguments.seconds * _COMPILING)
    if arguments.compile_only:
        return
    results = CsvResults(arguments.out, COLUMNS, arguments.commit)
    items = [TuningItem(cell, work[cell], results, latest) for cell in cells]
    run_in_workers(time_item, items, 1, latest + _LONGEST_CELL - time.monotonic())


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--pass", dest="passes", default=",".join(PASSES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default=",".join(LAYOUTS))
    parser.add_argument("--shape", default="", help="8x512x64x64,...; every shape of the targets when empty")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose repr it matches")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache and stop")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no cell after this time, half of which may be compiling",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
