"""Modules on CPU tensors against torch's own, forward and forward with backward, on one thread.

    python -m benchmarks.cpu --out benchmarks/results/cpu.csv

Rounds alternate between the two, and a round's processor time per call is one sample, so that the machine's other
work and its clock affect both alike.  The CSV has the medians of both times, and torch's time over fusednorm's:
1 over the median ratio of consecutive rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import fusednorm
import torch
from torch import Tensor, nn

from benchmarks.harness.csv_results import CsvResults, add_output_options

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
"""Bytes of x."""

OPERATIONS = ("layer_norm", "rms_norm", "group_norm", "group_norm channels-last")
COLUMNS = ("op", "dtype", "bytes", "shape", "pass", "fusednorm_us", "torch_us", "speed_over_torch")

_COLS, _CHANNELS, _GROUPS = 1024, 64, 32
_ROUND_S = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--seconds", type=float, default=2, help="for each cell (default: 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = CsvResults(arguments.out, COLUMNS, arguments.commit)
    for row in measure_rows(arguments.seconds):
        results.add_row(row)
        print(*row.values())
    print(*format_table(results.rows), sep="\n")


def measure_rows(seconds: float) -> Iterator[dict[str, object]]:
    """A row for each operation, dtype, size and pass."""
    for op in OPERATIONS:
        for dtype in (torch.float32, torch.bfloat16):
            for nbytes in SIZES:
                ours, theirs, x = _make_modules(op, dtype, nbytes)
                dy = torch.randn_like(x)
                calls = (
                    [_make_forward_call(ours, x), _make_forward_call(theirs, x)],
                    [_make_training_call(ours, x, dy), _make_training_call(theirs, x, dy)],
                )
                for pass_, pair in zip(("forward", "forward+backward"), calls, strict=True):
                    mine, other, ratio = time_alternately(pair[0], pair[1], seconds)
                    yield {
                        "op": op,
                        "dtype": str(dtype).removeprefix("torch."),
                        "bytes": nbytes,
                        "shape": "x".join(map(str, x.shape)),
                        "pass": pass_,
                        "fusednorm_us": f"{mine * 1e6:.1f}",
                        "torch_us": f"{other * 1e6:.1f}",
                        "speed_over_torch": f"{1 / ratio:.3f}",
                    }


def format_table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Lines of Markdown: a line for each operation, dtype and pass, a column for each size."""
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    yield f"| | type | pass | {' | '.join(_format_bytes(int(str(size))) for size in sizes)} |"
    yield "| --- " * (3 + len(sizes)) + "|"
    lines: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        cell = f"{row['speed_over_torch']} ({row['fusednorm_us']} / {row['torch_us']})"
        lines.setdefault((row["op"], row["dtype"], row["pass"]), []).append(cell)
    for of_line, cells in lines.items():
        yield f"| {' | '.join(map(str, (*of_line, *cells)))} |"


def time_alternately(
    first: Callable[[], object], second: Callable[[], object], seconds: float
) -> tuple[float, float, float]:
    """Median processor seconds of a call of each, in alternating rounds, and the median ratio."""
    calls = first, second
    counts: list[int] = []
    samples: tuple[list[float], list[float]] = [], []
    for call in calls:
        call()
        counts.append(max(1, int(_ROUND_S / _time_call(call, 3))))
    end = time.process_time() + seconds
    while time.process_time() < end or len(samples[0]) < 5:
        for call, count, of_call in zip(calls, counts, samples, strict=True):
            of_call.append(_time_call(call, count))
    quotients = [one / other for one, other in zip(*samples, strict=True)]
    return median(samples[0]), median(samples[1]), median(quotients)


def _time_call(call: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) / count


def _make_modules(op: str, dtype: torch.dtype, nbytes: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """Our module, torch's, and x."""
    elements = nbytes // dtype.itemsize
    pair: tuple[nn.Module, nn.Module]
    if op == "layer_norm":
        pair = fusednorm.LayerNorm(_COLS, dtype=dtype), nn.LayerNorm(_COLS, dtype=dtype)
    elif op == "rms_norm":
        pair = fusednorm.RMSNorm(_COLS, dtype=dtype), nn.RMSNorm(_COLS, dtype=dtype)
    else:
        pair = (
            fusednorm.GroupNorm(_GROUPS, _CHANNELS, dtype=dtype),
            nn.GroupNorm(_GROUPS, _CHANNELS, dtype=dtype),
        )
        positions = min(elements // _CHANNELS, 1024)
        side = 2 ** (positions.bit_length() // 2)
        shape = elements // (_CHANNELS * positions), _CHANNELS, positions // side, side
        layout = torch.channels_last if op.endswith("last") else torch.contiguous_format
        return *pair, torch.randn(shape, dtype=dtype).contiguous(memory_format=layout)
    return *pair, torch.randn(elements // _COLS, _COLS, dtype=dtype)


def _make_forward_call(module: nn.Module, x: Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: module(x))


def _make_training_call(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    leaves = x.clone().requires_grad_(), *module.parameters()
    return lambda: torch.autograd.grad(module(leaves[0]), leaves, dy)


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"


if __name__ == "__main__":
    main()
