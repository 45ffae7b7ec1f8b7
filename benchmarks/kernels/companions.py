"""Times GroupNorm where the residual or dy has x's memory format, and where it has the other one.

    PYTHONPATH=BEFORE/kernels:. python -m benchmarks.kernels.companions --out before.csv --commit COMMIT
    PYTHONPATH=kernels:. python -m benchmarks.kernels.companions --out after.csv

The first line times the kernels of another checkout.  Times are of the device, with the L2 cache flushed, beside a
copy of x in the same process.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import fusednorm
import torch
from torch import Tensor

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.timing import DeviceTimer

COLUMNS = ("dtype", "shape", "layout", "call", "us", "copy_us")
SHAPES = {
    torch.bfloat16: (
        (16, 320, 64, 64),
        (8, 640, 32, 32),
        (4, 128, 256, 256),
        (2, 512, 128, 128),
        (16, 1280, 16, 16),
        (2, 32, 96, 96, 96),
    ),
    torch.float32: ((16, 320, 64, 64), (16, 1280, 16, 16)),
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class CompanionCell(NamedTuple):
    """x: its dtype, shape and memory format."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_channels_last: bool

    def make_tensor(self, *, is_channels_last: bool, device: str) -> Tensor:
        """Random values in this shape and dtype."""
        made = torch.randn(self.shape, dtype=self.dtype, device=device)
        return made.contiguous(memory_format=_CHANNELS_LAST[len(self.shape)]) if is_channels_last else made


def iterate_cells() -> Iterator[CompanionCell]:
    """Every cell, channels-last before contiguous."""
    for dtype, shapes in SHAPES.items():
        for shape in shapes:
            for is_channels_last in (True, False):
                yield CompanionCell(dtype, shape, is_channels_last)


def make_calls(cell: CompanionCell, device: str) -> dict[str, Callable[[], object]]:
    """The calls of a cell by name, `copy` first."""
    x, same = (cell.make_tensor(is_channels_last=cell.is_channels_last, device=device) for _ in range(2))
    other = cell.make_tensor(is_channels_last=not cell.is_channels_last, device=device)
    weight, bias = torch.randn(2, cell.shape[1], dtype=cell.dtype, device=device)
    groups = 8 if cell.shape[1] == 32 else 32
    forward = partial(fusednorm.group_norm_forward, x, groups, weight, bias, activation="silu", stats=True)
    result = forward()
    backward = partial(
        fusednorm.group_norm_backward,
        x=x,
        num_groups=groups,
        weight=weight,
        bias=bias,
        mean=result.mean,
        rstd=result.rstd,
        activation="silu",
    )
    return {
        "copy": partial(same.clone().copy_, x),
        "forward, residual of the same format": partial(forward, residual=same),
        "forward, residual of the other format": partial(forward, residual=other),
        "backward, dy of the same format": partial(backward, same),
        "backward, dy of the other format": partial(backward, other),
    }


def main() -> None:
    """Measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    given = parser.parse_args()
    results = CsvResults(given.out, COLUMNS, given.commit)
    timer = DeviceTimer()
    for cell in iterate_cells():
        times = {name: 1e3 * timer(call).p50 for name, call in make_calls(cell, "cuda").items()}
        copy_us = times.pop("copy")
        about = (
            str(cell.dtype).removeprefix("torch."),
            "x".join(map(str, cell.shape)),
            "channels-last" if cell.is_channels_last else "contiguous",
        )
        for name, us in times.items():
            row = (*about, name, f"{us:.2f}", f"{copy_us:.2f}")
            results.add_row(dict(zip(COLUMNS, row, strict=True)))


if __name__ == "__main__":
    main()
