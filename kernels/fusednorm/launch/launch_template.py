"""Launches separated from the tensors of their plan, so that they can be repeated with other addresses.

Plans depend on shapes, strides and types.  For tensors that differ only in their addresses they make the same
launches, in which each argument is one of the tensors, a position in temporary memory, a workspace of the stream,
or a constant.  If all launches declare how they depend on the number of rows (`Launch.row_dependence`), that number
may differ as well.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.arguments.arrays import ITEMSIZES, Array, Workspace
from fusednorm.launch import prepared_kernels
from fusednorm.launch.launches import Launch
from fusednorm.launch.memories import get_or_allocate_stream_workspace

Pick = Callable[[list[Any]], tuple[Any, ...]]
"""A function that selects some items of a list, in a fixed order."""

_ALIGNED = 256
"""The number of bytes to whose multiples parts of a launch's own memory are aligned, as separate tensors are."""


class PreparedLaunch(NamedTuple):
    """One launch of a `LaunchTemplate`: its kernel, its grid, and where its parameters are in a list of values.

    The list is the template's list of all values that parameters can have.

    Attributes:
        kernel: the kernel to launch.
        grid: the grid; if `grid_slot` is not None, its first size is the list's item `grid_slot`.
        slots: the positions of the launch's parameters in the list.
        select: selects these parameters from the list.
    """

    kernel: prepared_kernels.PreparedKernel
    grid: tuple[int, int, int]
    grid_slot: int | None
    slots: tuple[int, ...]
    select: Pick


@dataclass(frozen=True, slots=True)
class LaunchTemplate:
    """The launches of one call, prepared to be repeated with tensors at other addresses.

    Tensors start at multiples of 16 bytes.  A repetition makes one list, from which each launch selects its
    kernel's parameters by index.  The list has, in this order: the addresses of the tensors; the addresses of
    arrays in the launches' own scratch memory, at `scratch_offsets`; the addresses of workspaces; if there are
    `program_rules`, the number of rows and the number of programs by each rule; `constants`, which start at index
    `first_constant_slot`; and a tuple for each of `tuples`, with the items of the list at the given indices.

    Attributes:
        device: the device of the launches, with its `device_index`.
        scratch_words: float32 elements of the launches' own memory, allocated by the empty tensor `empty_tensor`.
        workspaces: words and purpose of each.
        program_rules: `tile` and `most` of each rule by which a number of programs depends on the number of rows;
            empty if the number of rows is fixed.
        launches: the launches, in order.
    """

    device: torch.device
    device_index: int
    scratch_words: int
    empty_tensor: Tensor
    scratch_offsets: tuple[int, ...]
    workspaces: tuple[tuple[int, str], ...]
    program_rules: tuple[tuple[int, int], ...]
    first_constant_slot: int
    constants: list[Any]
    tuples: tuple[tuple[int, ...], ...]
    launches: tuple[PreparedLaunch, ...]

    @classmethod
    def from_launches(cls, launches: list[Launch], tensors: Mapping[str, Tensor]) -> "LaunchTemplate | None":
        """Make a template of launches that have run once; None if a template could not repeat them.

        Args:
            launches: all launches of one call, in order.
            tensors: the call's inputs and results, by the names that the launches' arrays have for their memory;
                the launches run on the first one's device.

        Returns:
            The template, or None if a tensor does not start at a multiple of 16 bytes, or if a kernel has not been
            launched on this device before.
        """
        if any(tensor.data_ptr() % 16 for tensor in tensors.values()):
            return None
        x = next(iter(tensors.values()))
        device, index = x.device, x.get_device()
        kernels = [prepared_kernels.find_prepared(launch, index) for launch in launches]
        own = _ScratchMemory.from_launches(launches)
        table = _SlotTable(tensors, own, launches)
        starts = []
        for launch, kernel in zip(launches, kernels, strict=True):
            if kernel is None:
                return None
            programs, y, z, *_ = (*launch.grid, 1, 1)
            places = table.list_slots(launch, kernel.constants)
            starts.append(
                PreparedLaunch(
                    kernel, (programs, y, z), table.find_grid_slot(launch), places, _make_selector(places)
                )
            )
        return cls(
            device=device,
            device_index=index,
            scratch_words=own.nbytes // 4,
            empty_tensor=x.new_empty(0, dtype=torch.float32),
            scratch_offsets=tuple(own.offsets.values()),
            workspaces=tuple(own.workspaces),
            program_rules=tuple(table.rules),
            first_constant_slot=table.first_value,
            constants=table.values,
            tuples=table.tuples,
            launches=tuple(starts),
        )

    def try_launch(self, addresses: list[Any], rows: int = 0) -> bool:
        """Repeat the launches with other tensors; False if a tensor is not aligned to 16 bytes.

        The launches are made on the current stream of `device`, which must be the current device.  The list of
        addresses, in the order of the tensors, must not be used after the call.

        Args:
            rows: the number of rows, at least 1; used only if the launches depend on it.
        """
        if reduce(or_, addresses) % 16:
            return False
        stream = self.launches[0].kernel.get_stream(self.device_index)
        if self.scratch_words:
            # Kept until everything is launched: the memory's next user then runs after these launches.
            own = self.empty_tensor.new_empty(self.scratch_words)
            start = own.data_ptr()
            addresses += [start + offset for offset in self.scratch_offsets]
        if self.workspaces:
            workspaces = [
                get_or_allocate_stream_workspace(self.device, stream, *workspace) for workspace in self.workspaces
            ]
            addresses += [workspace.data_ptr() for workspace in workspaces]
        if self.program_rules:
            addresses.append(rows)
            for tile, most in self.program_rules:
                programs = -(-rows // tile)
                addresses.append(programs if programs < most else most)
        addresses += self.constants
        if self.tuples:
            addresses += [tuple([addresses[place] for place in places]) for places in self.tuples]
        for kernel, (x, y, z), programs_at, _, pick in self.launches:
            call, head, packed = kernel.launcher
            if programs_at is not None:
                x = addresses[programs_at]
            if packed:
                call(x, y, z, stream, *head, pick(addresses))
            else:
                call(x, y, z, stream, *head, *pick(addresses))
        return True


@dataclass(slots=True)
class _ScratchMemory:
    """The memory of launches besides the tensors of the call: temporary arrays, and workspaces of the stream.

    Attributes:
        offsets: offsets in bytes of arrays in one allocation of `nbytes` bytes, by their workspace and offset
            there.
        workspaces: words and purpose of the stream's workspaces.
    """

    offsets: dict[tuple[Workspace, int], int]
    workspaces: dict[tuple[int, str], None]
    nbytes: int

    @classmethod
    def from_launches(cls, launches: list[Launch]) -> "_ScratchMemory":
        """List the temporary arrays and workspaces of launches; each array gets an offset in one allocation."""
        own, starts = cls({}, {}, 0), dict[Workspace, int]()
        for array in _iterate_arrays(argument for launch in launches for argument in launch.arguments):
            memory = array.memory
            if isinstance(memory, str):
                continue
            if memory.purpose is not None:
                own.workspaces[memory.count, memory.purpose] = None
                continue
            size = ITEMSIZES[memory.dtype]
            if memory not in starts:
                starts[memory] = own.nbytes
                own.nbytes += -(-memory.count * size // _ALIGNED) * _ALIGNED
            own.offsets[memory, array.offset] = starts[memory] + array.offset * size
        return own


class _SlotTable:
    """The position of each launch parameter in the list of values that a `LaunchTemplate` makes."""

    def __init__(self, tensors: Iterable[str], own: _ScratchMemory, launches: list[Launch]) -> None:
        addresses: tuple[Hashable, ...] = (*tensors, *own.offsets, *own.workspaces)
        self._addresses = {address: place for place, address in enumerate(addresses)}
        self._rows = len(addresses)
        self.rules = _list_program_rules(launches)
        self.first_value = self._rows + (1 + len(self.rules) if self.rules else 0)
        self._values: dict[tuple[type, Any], int] = {}
        self._tuples: dict[tuple[int, ...], int] = {}
        for launch in launches:
            for argument in launch.arguments:
                if type(argument) is tuple:
                    self._tuples.setdefault(tuple(map(self._find_argument_slot, argument)), len(self._tuples))

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self._values]

    @property
    def tuples(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._tuples)

    def find_grid_slot(self, launch: Launch) -> int | None:
        """Return where the first size of a launch's grid is in the list of values; None if the grid is constant.

        Only a grid that depends on the number of rows is not constant.
        """
        by_rows = launch.row_dependence
        if by_rows is None or not self.rules or not by_rows.scales_grid:
            return None
        return self._rows + 1 + self.rules.index((by_rows.tile_rows, by_rows.max_programs))

    def list_slots(self, launch: Launch, constants: tuple[Any, ...]) -> tuple[int, ...]:
        """Return where each parameter of a launch is in the list of values: arguments first, then constexprs."""
        places = [*map(self._find_argument_slot, launch.arguments), *map(self._find_constant_slot, constants)]
        by_rows = launch.row_dependence
        if by_rows is not None and self.rules:
            if by_rows.rows_index is not None:
                places[by_rows.rows_index] = self._rows
            if by_rows.programs_index is not None:
                places[by_rows.programs_index] = (
                    self._rows + 1 + self.rules.index((by_rows.tile_rows, by_rows.max_programs))
                )
        return tuple(places)

    def _find_argument_slot(self, argument: Any) -> int:
        """Return where an argument, which is an array, a tuple or a constant, is in the list of values.

        Constants are added to the list if necessary.
        """
        if type(argument) is Array:
            return self._addresses[_make_address_key(argument)]
        if type(argument) is tuple:
            # Tuples are at the end of the list.
            return self._tuples[tuple(map(self._find_argument_slot, argument))] - len(self._tuples)
        return self._find_constant_slot(argument)

    def _find_constant_slot(self, value: Any) -> int:
        return self.first_value + self._values.setdefault((type(value), value), len(self._values))


def _list_program_rules(launches: list[Launch]) -> tuple[tuple[int, int], ...]:
    """List the different rules by which launches compute their number of programs from the number of rows.

    A rule is `tile_rows` and `max_programs` of a `RowDependence`.  The list is empty unless every launch has
    a rule.
    """
    rules = [
        (launch.row_dependence.tile_rows, launch.row_dependence.max_programs)
        for launch in launches
        if launch.row_dependence is not None
    ]
    return tuple(dict.fromkeys(rules)) if len(rules) == len(launches) else ()


def _make_selector(places: tuple[int, ...]) -> Pick:
    """Make a function that returns the items of a list at the given positions as a tuple."""
    if len(places) == 1:
        # An item getter of one item does not return a tuple.
        return lambda table: (table[places[0]],)
    return itemgetter(*places)


def _make_address_key(array: Array) -> Hashable:
    """Make the key that stands for an array's address while parameters get their positions in the list of values.

    The key is the name of a tensor of the call, the memory and offset of a temporary array, or the size and
    purpose of a workspace of the stream.
    """
    memory = array.memory
    if isinstance(memory, str):
        return memory
    return (memory, array.offset) if memory.purpose is None else (memory.count, memory.purpose)


def _iterate_arrays(arguments: Iterable[Any]) -> Iterator[Array]:
    """Yield the arrays among the arguments of launches, also those in tuples."""
    for argument in arguments:
        if type(argument) is Array:
            yield argument
        elif type(argument) is tuple:
            yield from _iterate_arrays(argument)
