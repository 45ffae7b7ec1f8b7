"""Calls that come again with tensors at the same places of shared memory: what they are is found out once.

How to wait for the device and for answers is the clients', each in its own way; all else is here.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from normserve.client.answers.failures import api_error
from normserve.client.calls.arrays import Kind
from normserve.client.calls.call import Call
from normserve.client.local.arena import Arena
from normserve.client.local.device import Busy, DeviceArena
from normserve.client.local.memories import CudaMemory, Memory, NumpyMemory, Taken, TorchMemory
from normserve.client.local.messages import compute, timing_of, understood
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Located
from normserve.memory.host_tensors import DType

_MOST_CALLS, _MOST_PLACES = 256, 16

_PLAIN = frozenset([int, float, bool, str, type(None)])


@dataclass(frozen=True, slots=True)
class _Known:
    """A call that was answered once.

    Attributes:
        message: without places for the results.
        results: of each its name, its bytes, its dtype and its shape.
        make: what the client makes of them.
        contents: the message as it is sent, by the places of its results.
    """

    message: frames.Message
    results: Sequence[tuple[str, int, DType, tuple[int, ...]]]
    make: Callable[..., Any]
    contents: dict[Hashable, msgspec.Raw] = field(default_factory=dict)

    def content(self, blocks: Sequence[Taken]) -> msgspec.Raw:
        """The message with these places."""
        key = tuple([(block.place.segment, block.place.offset) for block in blocks])
        known = self.contents.get(key)
        if known is None:
            if len(self.contents) >= _MOST_PLACES:
                self.contents.clear()
            places = {name: block.place for (name, *_), block in zip(self.results, blocks, strict=True)}
            whole = msgspec.structs.replace(self.message, results=places)
            known = self.contents[key] = msgspec.Raw(msgspec.json.encode(whole))
        return known


class Again:
    """A call that is asked for again: what is sent, and what to make of the answer.

    Attributes:
        content: the message, encoded.
        blocks: where the results will lie.
    """

    __slots__ = ("_found", "_known", "_memory", "blocks", "content")

    def __init__(self, memory: Memory, known: _Known, blocks: Sequence[Taken]) -> None:
        self._memory = memory
        self._known = known
        self._found: dict[str, Any] = {}
        self.blocks = blocks
        self.content = known.content(blocks)

    def make_results(self) -> None:
        """Make the results' tensors, while the server computes what they hold."""
        for (name, _, dtype, shape), block in zip(self._known.results, self.blocks, strict=True):
            self._found[name] = self._memory.tensor(block, dtype, shape)

    def fits(self, told: frames.Answer) -> bool:
        """Whether an answer is what it was before."""
        return told.status == 200 and _are_as_known(told.results, self._known)

    def result(self, told: frames.Answer) -> Any:
        """The call's result, of an answer that fits."""
        return self._known.make(**self._found, timing=timing_of(told))


class Recurring:
    """Those of one connection with arrays of one kind."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: dict[Hashable, _Known] = {}

    def key(self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
        """What calls have in common that differ in nothing but what their tensors hold; None of other calls."""
        parts: list[Hashable] = [build]
        for value in arguments:
            kind = type(value)
            said = (kind, value) if kind in _PLAIN else self._said(kind, value)
            if not said:
                return None
            parts.append(said)
        for name, value in named.items():
            if value is not None:
                kind = type(value)
                said = (kind, value) if kind in _PLAIN else self._said(kind, value)
                if not said:
                    return None
                parts += (name, said)
        return tuple(parts)

    def _said(self, kind: type, value: Any) -> Hashable:
        """A tensor, or of a chain several tensors or names; () of anything else."""
        if kind is not list and kind is not tuple:
            return self._memory.described(value)
        parts = []
        for each in value:
            said = (type(each), each) if each is None or type(each) is str else self._memory.described(each)
            if not said:
                return ()
            parts.append(said)
        return (kind, *parts)

    def busy(self, key: Hashable) -> Busy | None:
        """What must be waited for before a call is asked for again, if it is known, and if there is anything."""
        return self._memory.busy() if key in self._known else None

    def begin(self, key: Hashable) -> Again | None:
        """Ask for a call again; None where nothing is known of it, or it needs more than was needed before."""
        known = self._known.get(key)
        if known is None:
            return None
        blocks = []
        for _, nbytes, _, _ in known.results:
            block = self._memory.take(nbytes)
            if block is None:
                return None
            blocks.append(block)
        return Again(self._memory, known, blocks)

    def end(self, key: Hashable, again: Again, told: frames.Answer, api_key: str | None) -> Any:
        """The call's result; None where it is not what it was before, and must be asked for anew.

        Args: api_key: what no error may repeat.

        Raises:
            ApiError: the server refused.
        """
        if again.fits(told):
            return again.result(told)
        self._known.pop(key, None)
        if told.status < 400:
            return None
        refused = understood(told, {})
        raise api_error(refused.status, refused.headers, bytes(refused.body), api_key)

    def learn(self, key: Hashable, call: Call[Any], result: Any) -> None:
        """Remember an operation that was answered."""
        if call.outputs is None or call.tensors is None:
            return
        located = {}
        for name, tensor in call.tensors.items():
            there = self._memory.located(tensor)
            assert there is not None
            located[name] = Located(*there, tensor.dtype.label, tensor.shape)
        names = [name for name in result.__slots__ if name != "timing"]
        found = {name: getattr(result, name) for name in names}
        results = []
        for name, tensor in found.items():
            if tensor is None:
                continue
            dtype, shape = DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)
            if 0 in shape:
                return
            results.append((name, prod(shape) * dtype.itemsize, dtype, shape))
        if len(self._known) >= _MOST_CALLS:
            self._known.clear()
        absent = {name: None for name, tensor in found.items() if tensor is None}
        kind: Callable[..., Any] = type(result)
        # Not the call, which has its tensors.
        self._known[key] = _Known(compute(call, located, {}), results, functools.partial(kind, **absent))


class KindsOfRecurring:
    """The recurring calls of one connection, by the kind of their arrays."""

    def __init__(self, arena: Arena) -> None:
        """Args: arena: in host memory."""
        self._arena = arena
        self._found = {Kind.NUMPY: Recurring(NumpyMemory(arena))}

    def of(self, kind: Kind) -> Recurring | None:
        """Those of one kind; None of `Kind.CUDA` before `share_device`."""
        found = self._found.get(kind)
        if found is None and kind is Kind.TORCH:
            # Only now, because torch is imported only by callers that use it.
            found = self._found[kind] = Recurring(TorchMemory(self._arena))
        return found

    def share_device(self, arena: DeviceArena) -> None:
        """Tensors in device memory can recur from now on."""
        if Kind.CUDA not in self._found:
            self._found[Kind.CUDA] = Recurring(CudaMemory(arena))

    def __contains__(self, recurring: Recurring) -> bool:
        return recurring in self._found.values()


def _are_as_known(told: Mapping[str, Located], known: _Known) -> bool:
    if len(told) != len(known.results):
        return False
    for name, _, dtype, shape in known.results:
        located = told.get(name)
        if located is None or located.dtype != dtype.label or located.shape != shape:
            return False
    return True
