"""Descriptions of launches, and functions that several plans use; `launch.execution` executes the launches."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import gt
from typing import Any, Protocol

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import is_hopper_or_newer
from fusednorm.errors import UnsupportedShapeError

MAX_GRID = (2**31 - 1, 65535, 65535)
"""The most programs along each axis of a grid; of every architecture since Kepler."""

MAX_VEC = 8
REGISTERS_PER_SM = 65536
"""Registers of a multiprocessor, of every architecture since Kepler."""

SHARED_BYTES_PER_SM = 200 << 10
"""Shared memory for tiles that are being loaded; a Hopper multiprocessor has 228 KB, some used by the system."""


@dataclass(frozen=True, slots=True)
class RowDependence:
    """How the grid and arguments of a launch over rows depend on the number of rows.

    The number of programs is the number of tiles of `tile_rows` rows, at most `max_programs`.

    Attributes:
        tile_rows, max_programs: as above; launches of one pass with the same `tile_rows` and `max_programs` have
            the same number of programs.
        scales_grid: whether the launch's grid has that number of programs; else the grid is constant.
        rows_index, programs_index: the positions of the numbers of rows and of programs among the arguments, or
            None.
    """

    tile_rows: int = 1
    max_programs: int = sys.maxsize
    scales_grid: bool = True
    rows_index: int | None = None
    programs_index: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One planned launch of a kernel, with descriptions of arrays in place of their addresses.

    Attributes:
        arguments: numbers, None, and arrays or tuples of arrays in place of their addresses.
        options: constexprs and compile options.

    Raises:
        UnsupportedShapeError: the grid has more programs along an axis than a device takes.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    row_dependence: RowDependence | None = None

    def __post_init__(self) -> None:
        if any(map(gt, self.grid, MAX_GRID)):
            raise UnsupportedShapeError(
                f"a grid must have at most {MAX_GRID[0]}, {MAX_GRID[1]} and {MAX_GRID[2]} programs along its axes, "
                f"got {' x '.join(map(str, self.grid))}: divide the call into calls of fewer samples or rows"
            )


def fix_row_counts(launches: list[Launch]) -> list[Launch]:
    """Return the launches without their dependence on the number of rows.

    The number of rows is not the product of all axes but the last, as for calls of any number of rows.
    """
    return [replace(launch, row_dependence=None) for launch in launches]


def make_early_options(early: bool) -> dict[str, object]:
    """Make the options by which a launch may start early: before the previous kernel in the stream ends.

    If `early`, the kernel waits for the previous kernel in its own code (programmatic dependent launch).
    """
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


class ResidentConfig(Protocol):
    """A kernel's configuration that needs `programs_per_sm` programs resident on a multiprocessor at once."""

    @property
    def num_warps(self) -> int: ...

    @property
    def programs_per_sm(self) -> int: ...


def compute_max_registers(config: ResidentConfig) -> int:
    """Compute the most registers per thread with which `programs_per_sm` programs can be resident."""
    return min(255, REGISTERS_PER_SM // (32 * config.num_warps * config.programs_per_sm) // 8 * 8)


def make_cooperative_options(config: ResidentConfig) -> dict[str, object]:
    """Make the options of a launch whose programs wait for one another: either all are resident, or none starts."""
    return {"maxnreg": compute_max_registers(config), "launch_cooperative_grid": True}


def can_prefetch(vec: int, *arrays: Array | None) -> bool:
    """Return whether adjacent vectors of `vec` elements can be prefetched in bulk from the arrays into L2.

    The device must have bulk prefetches, and the vectors must start and end at multiples of 16 bytes.
    """
    for array in arrays:
        if array is not None and not (
            array.is_aligned and vec * array.element_size() % 16 == 0 and is_hopper_or_newer(array.device)
        ):
            return False
    return True


def fit_stages(stages: int, tile_bytes: int) -> int:
    """Reduce the number of a loop's pipeline stages, of which all but one are in shared memory, until they fit.

    `tile_bytes` are those that one stage of all programs of a multiprocessor loads.
    """
    return min(stages, 1 + SHARED_BYTES_PER_SM // tile_bytes)


def has_one_lane_per_thread(access_bytes: int, *arrays: Array | None) -> bool:
    """Return whether each thread gets a single lane, the elements of one access; only 16-byte accesses ensure this.

    The compiler distributes narrower accesses over adjacent threads and gives each several lanes, so that
    the reduction tree of `merge_equal_sets` is not full.

    Accesses have `access_bytes` bytes if the arrays start at multiples of 16.
    """
    return access_bytes == 16 and all(array is None or array.is_aligned for array in arrays)


def count_full_chunks(length: int, block: int, chunks: int, one_lane_per_thread: bool) -> int:
    """Compute the constant FULL: how many chunks of a program with `length` elements have no masked elements.

    The program reads them in `chunks` chunks of `block` elements.

    If all chunks are full, moments are merged as sets of equal size.  This needs one lane per thread;
    without it FULL is at most chunks - 1.
    """
    return min(length // block, chunks if one_lane_per_thread else chunks - 1)


def count_full_range_chunks(length: int, block: int, chunks: int, lane_a_thread: bool) -> int:
    """Compute FULL for programs that have ranges of `chunks` chunks each: `chunks` or 0."""
    return chunks if lane_a_thread and length % (chunks * block) == 0 else 0
