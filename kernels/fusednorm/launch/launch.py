"""Launches as plans describe them, and functions that several plans use; `launch.run` makes the launches."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusednorm.devices.device import since_hopper

MAX_VEC = 8
REGISTERS_PER_SM = 65536
"""Registers of a multiprocessor, of every architecture since Kepler."""


@dataclass(frozen=True, slots=True)
class ByRows:
    """How a launch over rows follows from their number, where nothing else of it does.

    There are as many programs as tiles of `tile` rows, at most `most`.

    Attributes:
        tile, most: as above; what follows one another in a pass and has both in common has as many programs.
        grid: whether the launch is of that many; else its grid is always the same.
        rows, programs: where the number of rows and that of programs stand among the arguments, if they do.
    """

    tile: int = 1
    most: int = sys.maxsize
    grid: bool = True
    rows: int | None = None
    programs: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, decided but not yet made; `options` holds constexprs and compile options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    by_rows: ByRows | None = None


def dependent(early: bool) -> dict[str, object]:
    """Options of a launch of a kernel that awaits the one before it: `early`, it starts before that one ends."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


class Resident(Protocol):
    """A configuration of programs of which so many are to be on a multiprocessor at once."""

    @property
    def num_warps(self) -> int: ...

    @property
    def programs_per_sm(self) -> int: ...


def registers_for(config: Resident) -> int:
    """Registers that a thread may have for `programs_per_sm` programs to be resident."""
    return min(255, REGISTERS_PER_SM // (32 * config.num_warps * config.programs_per_sm) // 8 * 8)


def resident_options(config: Resident) -> dict[str, object]:
    """Options of a launch whose programs wait for one another: all of them fit the registers, or none starts."""
    return {"maxnreg": registers_for(config), "launch_cooperative_grid": True}


def can_prefetch(vec: int, *tensors: torch.Tensor | None) -> bool:
    """Whether runs of vectors of `vec` elements of the tensors start and end on 16 bytes, and may be asked for."""
    return all(
        tensor is None
        or (vec * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0 and since_hopper(tensor.device))
        for tensor in tensors
    )


def has_lane_a_thread(width: int, *tensors: torch.Tensor | None) -> bool:
    """Whether accesses to tensors, `width` bytes where these start at multiples of 16, are of 16 bytes.

    Narrower ones the compiler gives to neighbouring threads, and several lanes to each: `merge_even` then has no
    full tree.
    """
    return width == 16 and all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def known_whole(length: int, block: int, chunks: int, lane_a_thread: bool) -> int:
    """FULL of a program that has all of `length` in `chunks` chunks: those that are known to be whole.

    Moments of chunks that are all whole are merged as equals, so without a lane a thread one fewer than all.
    """
    return min(length // block, chunks if lane_a_thread else chunks - 1)


def known_whole_in_slabs(length: int, block: int, chunks: int, lane_a_thread: bool) -> int:
    """`known_whole` of programs that have slabs of `chunks` chunks each: all or none."""
    return chunks if lane_a_thread and length % (chunks * block) == 0 else 0
