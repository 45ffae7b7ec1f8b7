"""Times every plausible launch configuration of a LayerNorm pass, the basis of `layer_norm.config_tables`.

    python -m benchmarks.tune.layer_norm --out tune.csv [--pass forward] [--dtype bfloat16] [--cols 4096] [--rows 1]
    python -m benchmarks.tune.layer_norm --out tune.csv --pass backward --cols 3072 --activation silu

With --positions 3136, --cols are the channels of --rows contiguous samples, over which the pass normalises.

Each configuration must agree with the table's own choice before it is timed.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator

from fusednorm.arguments.checks import ACTIVATIONS

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.timing import DeviceTimer
from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.tune.layer_norm import channels_first_candidates
from benchmarks.tune.layer_norm.candidates import iterate_candidates
from benchmarks.tune.layer_norm.trials import (
    Config,
    LayerNormTuningCell,
    compile_config,
    select_distinct_kernels,
    time_cell,
)
from benchmarks.workload.cell_suites import LONG_ROW_LENGTHS, PASSES, ROW_LENGTHS

COLUMNS = ("pass", "rows", "cols", "positions", "dtype", "activation", "config", "ms", "of_copy")


def main() -> None:
    arguments = _parse_arguments()
    cells = [
        LayerNormTuningCell(pass_, cols, dtype, rows, arguments.positions, arguments.activation)
        for pass_ in arguments.passes.split(",")
        for dtype in arguments.dtype.split(",")
        for cols in map(int, arguments.cols.split(","))
        for rows in map(int, arguments.rows.split(","))
    ]
    work = {
        cell: [config for config in _iterate_cell_candidates(cell) if re.search(arguments.only, repr(config))]
        for cell in cells
    }
    began = time.monotonic()
    kernels = select_distinct_kernels((cell, config) for cell, configs in work.items() for config in configs)
    run_in_workers(compile_config, kernels, count_workers(), arguments.seconds)
    print(f"{len(kernels)} configurations compiled in {time.monotonic() - began:.0f} s", flush=True)

    timer = DeviceTimer()
    results = CsvResults(arguments.out, COLUMNS, arguments.commit)
    for cell, configs in work.items():
        if time.monotonic() - began > arguments.seconds:
            print("out of time", file=sys.stderr)
            break
        rows = time_cell(cell, configs, timer)
        about = (cell.pass_, cell.rows, cell.cols, cell.positions, cell.dtype, cell.activation)
        for row in rows:
            figures = (row.name, f"{row.ms:.5f}", f"{row.of_copy:.4f}")
            results.add_row(dict(zip(COLUMNS, (*about, *figures), strict=True)))
        best = "; ".join(f"{row.of_copy:.3f} {row.name}" for row in rows[:4])
        positions = f"x{cell.positions}" if cell.positions else ""
        print(f"{cell.pass_} {cell.dtype} {cell.rows}x{cell.cols}{positions}: {best}", flush=True)


def _iterate_cell_candidates(cell: LayerNormTuningCell) -> Iterator[Config]:
    """The configurations that may suit a cell."""
    if cell.positions:
        yield from channels_first_candidates.iterate_candidates(
            cell.pass_, cell.cols, cell.positions, cell.itemsize
        )
    else:
        yield from iterate_candidates(cell.pass_, cell.cols, cell.itemsize)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--pass", dest="passes", default=",".join(PASSES))
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--cols", default=",".join(map(str, ROW_LENGTHS + LONG_ROW_LENGTHS[:-1])))
    parser.add_argument("--rows", default="0", help="0 is as many as make x 256 MiB")
    parser.add_argument("--positions", type=int, default=0, help="of a sample; 0 for rows that are contiguous")
    parser.add_argument("--activation", default="none", choices=ACTIVATIONS, help="after the affine step (none)")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose repr it matches")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no cell after this time, compiling included"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
