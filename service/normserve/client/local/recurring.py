"""Calls that come again with tensors at the same places of the device's memory: what they are is found out once."""

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import msgspec

from normserve.client.calls.call import Call
from normserve.client.calls.on_device import OnDevice
from normserve.client.deadlines import Deadline
from normserve.client.local.device import DeviceArena, DeviceBlock
from normserve.client.local.messages import compute, understood
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import ALIGNMENT, Located
from normserve.memory.host_tensors import DType

_MOST_CALLS, _MOST_PLACES = 256, 16


class Link(Protocol):
    """What calls go over."""

    def ask(
        self, message: msgspec.Raw, deadline: Deadline, used: object, meanwhile: Callable[[], None]
    ) -> frames.Answer:
        """Send a message and wait for its answer."""


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

    def content(self, blocks: Sequence[DeviceBlock]) -> msgspec.Raw:
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


class Recurring:
    """Those of one connection."""

    def __init__(self, arena: DeviceArena) -> None:
        self._arena = arena
        torch: Any = sys.modules["torch"]
        self._types = frozenset([torch.Tensor, torch.nn.Parameter])
        self._known: dict[Hashable, _Known] = {}

    def key(self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
        """What calls have in common that differ in nothing but what their tensors hold; None of other calls."""
        parts: list[Hashable] = [build]
        for value in arguments:
            parts.append(self._described(value))
        for name, value in named.items():
            if value is not None:
                parts += (name, self._described(value))
        # Whatever could not be described.
        return None if () in parts else tuple(parts)

    def ask(self, key: Hashable, link: Link, deadline: Deadline) -> Any:
        """The result of a call; None where nothing is known of it, or it needs more than was needed before."""
        known = self._known.get(key)
        if known is None:
            return None
        arena = self._arena
        if busy := arena.busy_stream():
            busy.wait()
        blocks = []
        for _, nbytes, _, _ in known.results:
            block = arena.take_block(nbytes)
            if block is None:
                return None
            blocks.append(block)
        found: dict[str, Any] = {}

        def make_results() -> None:
            for (name, _, dtype, shape), block in zip(known.results, blocks, strict=True):
                found[name] = arena.tensor(block, dtype, shape)

        told = link.ask(known.content(blocks), deadline, blocks, make_results)
        if told.status != 200 or not _are_as_known(told.results, known):
            # Whoever asks anew hears what is wrong.
            self._known.pop(key, None)
            return None
        return known.make(**found, timing=understood(told, {}).timing())

    def learn(self, key: Hashable, call: Call[Any], result: Any) -> None:
        """Remember a call that was answered."""
        located = {}
        for name, tensor in (call.tensors or {}).items():
            assert isinstance(tensor, OnDevice)
            there = self._arena.locate_tensor(tensor.tensor)
            assert there is not None
            located[name] = Located(*there, tensor.dtype.label, tensor.shape)
        names = [name for name in result.__slots__ if name != "timing"]
        found = {name: getattr(result, name) for name in names}
        results = []
        for name, tensor in found.items():
            if tensor is None:
                continue
            dtype, shape = DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)
            if not tensor.numel():
                return
            results.append((name, prod(shape) * dtype.itemsize, dtype, shape))
        if len(self._known) >= _MOST_CALLS:
            self._known.clear()
        absent = {name: None for name, tensor in found.items() if tensor is None}
        kind: Callable[..., Any] = type(result)
        # Not the call, which has its tensors.
        self._known[key] = _Known(compute(call, located, {}), results, functools.partial(kind, **absent))

    def _described(self, value: Any) -> Hashable:
        """A tensor by its place, and what else the call says; () of what is neither."""
        kind = type(value)
        if kind not in self._types:
            return (kind, value) if kind in (int, float, bool, str, type(None)) else ()
        if not value.is_cuda or value.is_neg():
            return ()
        found = self._arena.locate_tensor(value)
        return () if found is None or found[1] % ALIGNMENT else (found, value.dtype, value.shape)


def _are_as_known(told: Mapping[str, Located], known: _Known) -> bool:
    if len(told) != len(known.results):
        return False
    for name, _, dtype, shape in known.results:
        located = told.get(name)
        if located is None or located.dtype != dtype.label or located.shape != shape:
            return False
    return True
