"""Launches told apart from what they were made for: the same ones again, over tensors at other addresses.

Plans look at shapes, strides and types.  Over tensors that differ in nothing but their addresses they make the same
launches, in which each argument is one of the tensors, a place in a workspace of the launches' own, a stream's
mailbox, or the same value: which it is follows from the launches themselves.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.launch import prepared
from fusednorm.launch.launch import Launch, mailbox_again

Pick = Callable[[list[Any]], tuple[Any, ...]]
"""Takes some of a list's items, in an order of its own."""

_ALIGNED = 256
"""Bytes at whose multiples parts of a workspace start, as tensors of their own would."""


class _Start(NamedTuple):
    """One launch: `pick` takes its parameters out of the addresses and values of a call."""

    kernel: prepared.Prepared
    grid: tuple[int, int, int]
    pick: Pick


@dataclass(frozen=True, slots=True)
class Recipe:
    """Launches over tensors that start at multiples of 16 bytes.

    Parameters are taken out of one list: the addresses of the tensors, of the workspace at `offsets`, and of
    mailboxes; then `values`, and then a tuple for each of `tuples`.

    Attributes:
        device: where, and its `index`.
        words: float32 elements of the workspace, made from `empty`, which has none.
        mailboxes: the size of each.
        starts: the launches, in order.
    """

    device: torch.device
    index: int
    words: int
    empty: Tensor
    offsets: tuple[int, ...]
    mailboxes: tuple[int, ...]
    values: list[Any]
    tuples: tuple[Pick, ...]
    starts: tuple[_Start, ...]

    @classmethod
    def of(cls, launches: list[Launch], tensors: tuple[Tensor, ...]) -> "Recipe | None":
        """That of launches that have been made; None where not all of it follows from the tensors.

        Args:
            tensors: those that the launches were planned over, the first of them where they run.
        """
        # A tensor that is two would stand for either in the launches; the next time these may be two.
        if len({id(tensor) for tensor in tensors}) != len(tensors):
            return None
        if any(tensor.data_ptr() % 16 for tensor in tensors):
            return None
        device, index = tensors[0].device, tensors[0].get_device()
        kernels = [prepared.find(launch.kernel, launch.arguments, launch.options, index) for launch in launches]
        own = _Own.of(launches, tensors)
        if own is None:
            return None
        table = _Table(tensors, own, launches)
        starts = []
        for launch, kernel in zip(launches, kernels, strict=True):
            if kernel is None:
                return None
            programs, y, z, *_ = (*launch.grid, 1, 1)
            starts.append(_Start(kernel, (programs, y, z), table.pick(launch.arguments, kernel.constants)))
        return cls(
            device=device,
            index=index,
            words=own.nbytes // 4,
            empty=tensors[0].new_empty(0, dtype=torch.float32),
            offsets=tuple(own.parts.values()),
            mailboxes=tuple(own.mailboxes.values()),
            values=table.values,
            tuples=table.tuples,
            starts=tuple(starts),
        )

    def launch(self, at: list[Any]) -> bool:
        """Launch on the current device, which is this one, and its current stream, if the addresses allow it.

        Args:
            at: addresses of the tensors, in their order; of no use afterwards.
        """
        start = bits = 0
        if self.words:
            # Held until all is launched: who gets its memory then uses it after these launches.
            workspace = self.empty.new_empty(self.words)
            start = bits = workspace.data_ptr()
        for address in at:
            bits |= address
        # A tensor without memory, as tracers have them, lies at 0.
        if bits % 16 or 0 in at:
            return False
        stream = self.starts[0].kernel.stream_of(self.index)
        mailboxes = [mailbox_again(self.device, stream, words) for words in self.mailboxes]
        at += [start + offset for offset in self.offsets]
        at += [mailbox.data_ptr() for mailbox in mailboxes]
        at += self.values
        at += [pick(at) for pick in self.tuples]
        for kernel, (programs, y, z), pick in self.starts:
            call, head, packed = kernel.launcher
            parameters = pick(at)
            if packed:
                call(programs, y, z, stream, *head, parameters)
            else:
                call(programs, y, z, stream, *head, *parameters)
        return True


@dataclass(slots=True)
class _Own:
    """Memory of launches that is not that of the tensors they were planned over.

    Attributes:
        parts: where tensors of float32 lie in one workspace of `nbytes` bytes, by their addresses.
        mailboxes: words of those, by their addresses.
    """

    parts: dict[int, int]
    mailboxes: dict[int, int]
    nbytes: int

    @classmethod
    def of(cls, launches: list[Launch], others: Iterable[Tensor]) -> "_Own | None":
        """That of the launches beside `others`; None where a tensor is neither room to write to nor a mailbox."""
        theirs, memory_of_others = {id(tensor) for tensor in others}, {_memory(tensor)[0] for tensor in others}
        own, starts = cls({}, {}, 0), {}
        for tensor in _tensors(argument for launch in launches for argument in launch.arguments):
            if id(tensor) in theirs:
                continue
            memory, nbytes = _memory(tensor)
            if memory in memory_of_others or memory % 16:
                return None
            address = tensor.data_ptr()
            if tensor.dtype == torch.int64 and address == memory and 8 * tensor.numel() == nbytes:
                own.mailboxes[address] = tensor.numel()
            elif tensor.dtype == torch.float32:
                if memory not in starts:
                    starts[memory] = own.nbytes
                    own.nbytes += -(-nbytes // _ALIGNED) * _ALIGNED
                own.parts[address] = starts[memory] + address - memory
            else:
                return None
        return own


class _Table:
    """The list that launches take their parameters from: where each stands in it."""

    def __init__(self, tensors: tuple[Tensor, ...], own: _Own, launches: list[Launch]) -> None:
        self._tensors = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._addresses = {
            address: place for place, address in enumerate((*own.parts, *own.mailboxes), len(tensors))
        }
        self._first_value = len(tensors) + len(self._addresses)
        self._values: dict[tuple[type, Any], int] = {}
        self._tuples: dict[tuple[int, ...], int] = {}
        for launch in launches:
            for argument in launch.arguments:
                if type(argument) is tuple:
                    self._tuples.setdefault(tuple(map(self._argument, argument)), len(self._tuples))

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self._values]

    @property
    def tuples(self) -> tuple[Pick, ...]:
        return tuple(map(_pick, self._tuples))

    def pick(self, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> Pick:
        """What takes the parameters of a launch out of the list."""
        return _pick((*map(self._argument, arguments), *map(self._value, constants)))

    def _argument(self, argument: Any) -> int:
        if isinstance(argument, Tensor):
            place = self._tensors.get(id(argument))
            return self._addresses[argument.data_ptr()] if place is None else place
        if type(argument) is tuple:
            # Tuples end the list.
            return self._tuples[tuple(map(self._argument, argument))] - len(self._tuples)
        return self._value(argument)

    def _value(self, value: Any) -> int:
        return self._first_value + self._values.setdefault((type(value), value), len(self._values))


def _pick(places: tuple[int, ...]) -> Pick:
    if len(places) == 1:
        # An item getter of one item gives no tuple.
        return lambda table: (table[places[0]],)
    return itemgetter(*places)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif type(argument) is tuple:
            yield from _tensors(argument)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
