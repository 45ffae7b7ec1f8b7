"""Library calls on CPU tensors in two versions by turns, on one thread.

    python -m benchmarks.cpu_version_pairs --before CHECKOUT --out FILE.csv
    python -m benchmarks.cpu_version_pairs --before CHECKOUT --cells 'group_norm .* dropout' --out FILE.csv

CHECKOUT is a checkout of the older version (`git worktree add CHECKOUT COMMIT`); the newer one is what runs this.
Each version has a process of its own.  A turn is some calls of one version, a pair is a turn of each, in
alternating order.  The speed is the processor time of a call before divided by the one after, so that more is
better: the median of the ratios within pairs, with its confidence interval of 95 %.  With `--before .` the version
is compared with itself.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.serve.version_pairs import compute_median_interval

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
"""Bytes of x."""

OPTIONS = ("plain", "silu", "residual", "dropout", "heads", "scale", "channels-last, mean 30")
"""`heads` are parameters of each of two heads, `scale` is GroupNorm's scale and shift of each sample."""

COLUMNS = ("op", "pass", "option", "dtype", "bytes", "before_us", "after_us", "speed", "low", "high", "pairs")

_COLS, _CHANNELS, _GROUPS = 1024, 64, 32
_TURN_S = 2e-3
_WORKER = "--worker"


@dataclass(frozen=True, slots=True)
class CpuCallCell:
    """One kind of call; the names of its fields are columns."""

    op: str
    pass_: str
    option: str
    dtype: str
    nbytes: int

    @property
    def full_name(self) -> str:
        """The text that `--cells` searches."""
        return f"{self.op} {self.pass_} {self.option} {self.dtype} {self.nbytes}"


def iterate_cells() -> Iterator[CpuCallCell]:
    """Every call that the library has."""
    for op in ("layer_norm", "rms_norm", "group_norm"):
        for option in OPTIONS:
            of_groups = option in ("scale", "channels-last, mean 30")
            if (of_groups and op != "group_norm") or (option == "heads" and op == "group_norm"):
                continue
            for pass_ in ("forward", "backward"):
                for dtype in ("float32", "bfloat16"):
                    yield from (CpuCallCell(op, pass_, option, dtype, nbytes) for nbytes in SIZES)


class CpuVersionProcess:
    """A process that makes the calls of one checkout."""

    def __init__(self, checkout: Path) -> None:
        # The script itself, not as a module: the older version's own benchmarks may lack it.
        here = Path(__file__).resolve()
        self._process = subprocess.Popen(
            [sys.executable, here, _WORKER],
            env=os.environ | {"PYTHONPATH": f"{(checkout / 'kernels').resolve()}:{here.parents[1]}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "CpuVersionProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def time_turn(self, cell: CpuCallCell) -> float:
        """Return the processor seconds of a call; the first turn of a cell prepares the tensors, too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(cell)) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def measure_cell(
    before: CpuVersionProcess, after: CpuVersionProcess, cell: CpuCallCell, pairs: int
) -> dict[str, object]:
    """Return the row of a cell."""
    for version in (before, after):
        version.time_turn(cell)
    turns: dict[CpuVersionProcess, list[float]] = {before: [], after: []}
    for number in range(pairs):
        for version in (before, after)[:: 1 if number % 2 else -1]:
            turns[version].append(version.time_turn(cell))
    speeds = [old / new for old, new in zip(turns[before], turns[after], strict=True)]
    low, high = compute_median_interval(speeds)
    return {
        "op": cell.op,
        "pass": cell.pass_,
        "option": cell.option,
        "dtype": cell.dtype,
        "bytes": cell.nbytes,
        "before_us": f"{1e6 * median(turns[before]):.1f}",
        "after_us": f"{1e6 * median(turns[after]):.1f}",
        "speed": f"{median(speeds):.2f}",
        "low": f"{low:.2f}",
        "high": f"{high:.2f}",
        "pairs": pairs,
    }


def run_requested_turns(requests: TextIO, times: TextIO) -> None:
    """Make a turn of calls for each cell that is requested, and write its processor seconds of a call."""
    import torch

    torch.set_num_threads(1)
    cell, call, count = None, None, 1
    for line in requests:
        wanted = CpuCallCell(**json.loads(line))
        if wanted != cell or call is None:
            cell, call = wanted, make_call(wanted)
            _time_calls(call, 1)
            count = max(1, int(_TURN_S / _time_calls(call, 3)))
        print(_time_calls(call, count), file=times, flush=True)


def make_call(cell: CpuCallCell) -> Callable[[], object]:
    """Return a call with random tensors; `backward` is the gradient alone, of all that has one."""
    import fusednorm
    import torch

    dtype = getattr(torch, cell.dtype)
    elements = cell.nbytes // dtype.itemsize
    size = _CHANNELS if cell.op == "group_norm" else _COLS
    is_heads, is_last = cell.option == "heads", cell.option == "channels-last, mean 30"
    if cell.op == "group_norm":
        side = min(32, int((elements // size) ** 0.5))
        shape: tuple[int, ...] = elements // (size * side * side), size, side, side
    else:
        shape = (max(1, elements // (2 * size)), 2, size) if is_heads else (elements // size, size)
    x = torch.randn(shape).to(dtype)
    if is_last:
        x = (x + 30).contiguous(memory_format=torch.channels_last)
    parameters = [torch.randn((2, size) if is_heads else (size,), dtype=dtype) for _ in ("weight", "bias")]
    named: dict[str, torch.Tensor] = {}
    if cell.option == "scale":
        named = {name: torch.randn(len(x), size, dtype=dtype) for name in ("scale", "shift")}
    options: Any = {"silu": {"activation": "silu"}, "dropout": {"dropout": 0.1, "seed": 1}}.get(cell.option, {})
    residual = [torch.randn_like(x)] if cell.option == "residual" else []
    groups = [_GROUPS] if cell.op == "group_norm" else []
    tensors = [x, *residual, *parameters[: 1 if cell.op == "rms_norm" else 2], *named.values()]
    function = getattr(fusednorm, f"add_{cell.op}" if residual else cell.op)
    inputs = 1 + len(residual)

    def call_function() -> Any:
        made = function(
            *tensors[:inputs], *groups, *parameters[: 1 if cell.op == "rms_norm" else 2], **named, **options
        )
        return made[0] if residual else made

    if cell.pass_ == "forward":
        return torch.no_grad()(call_function)
    for tensor in tensors:
        tensor.requires_grad_()
    y, dy = call_function(), torch.randn_like(x)
    return lambda: torch.autograd.grad(y, tensors, dy, retain_graph=True)


def _time_calls(call: Callable[[], object], count: int) -> float:
    began = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count


def main() -> None:
    if _WORKER in sys.argv:
        run_requested_turns(sys.stdin, sys.stdout)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    add_output_options(parser)
    parser.add_argument("--cells", default="", help="a regular expression; by default all")
    parser.add_argument("--pairs", type=int, default=40)
    arguments = parser.parse_args()
    chosen = [cell for cell in iterate_cells() if re.search(arguments.cells, cell.full_name)]
    results = CsvResults(arguments.out, COLUMNS, arguments.commit)
    with CpuVersionProcess(arguments.before) as before, CpuVersionProcess(Path(__file__).parents[1]) as after:
        for cell in chosen:
            row = measure_cell(before, after, cell, arguments.pairs)
            results.add_row(row)
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
