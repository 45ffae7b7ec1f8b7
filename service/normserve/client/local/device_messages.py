"""From calls with tensors on a device to the protocol's messages, and from its answers to those of calls."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from normserve.client.calls.call import Call
from normserve.client.calls.on_device import OnDevice
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.local.device import Busy, DeviceArena, DeviceBlock
from normserve.client.local.messages import DTYPES, LocalAnswer, compute, understood
from normserve.client.quoting import quoted
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Located, Message
from normserve.memory.host_tensors import HostTensor

_LEAST_GROWTH, _MOST_GROWTH = 64 * 2**20, 256 * 2**20

_R = TypeVar("_R")

DeviceNeeds = Generator[int | Busy, None, _R]
"""Yields how many bytes the arena lacks, until it has them, and what must be waited for."""


@dataclass(frozen=True, slots=True)
class PreparedOnDevice:
    """A call as a message.

    Attributes:
        inputs: what keeps the memory that the server reads.
        results: where each result will lie.
    """

    message: Message
    inputs: list[Any]
    results: Mapping[str, DeviceBlock]


def x_of(call: Call[Any]) -> OnDevice | None:
    """The x of a call that may be computed where it lies, on a device; None of any other call."""
    if call.outputs is None or call.tensors is None:
        return None
    x = call.tensors.get("x")
    return x if isinstance(x, OnDevice) else None


def prepare_on_device(call: Call[Any], arena: DeviceArena) -> DeviceNeeds[PreparedOnDevice]:
    """Put a call's tensors where the server finds them, each copied once if it does not lie there already."""
    assert call.tensors is not None
    assert call.outputs is not None
    if busy := arena.busy_stream():
        yield busy
    copies: list[Any] = []
    located = {}
    for name, tensor in call.tensors.items():
        located[name] = yield from _located(tensor, arena, copies)
    results = {}
    for name, output in call.outputs.items():
        results[name] = yield from taken_on_device(arena, output.most_bytes)
    if copies and (busy := arena.busy_stream()):
        yield busy
    places = {name: block.place for name, block in results.items()}
    return PreparedOnDevice(compute(call, located, places), copies, results)


def taken_on_device(arena: DeviceArena, nbytes: int) -> DeviceNeeds[DeviceBlock]:
    """A block of the arena."""
    while (block := arena.take(nbytes)) is None:
        yield nbytes
    return block


def _located(tensor: HostTensor, arena: DeviceArena, inputs: list[Any]) -> DeviceNeeds[Located]:
    source = tensor.tensor if isinstance(tensor, OnDevice) else None
    if source is not None and source.device.index == arena.ordinal:
        found = arena.locate_tensor(source)
        if found is not None:
            return Located(*found, tensor.dtype.label, tensor.shape)
    block = yield from taken_on_device(arena, tensor.nbytes)
    there = arena.tensor(block, tensor.dtype, tensor.shape)
    arena.fill(there, tensor.data if source is None else source)
    # Of no elements there is nothing that would keep the block.
    inputs += (block, there)
    return Located(block.place.segment, block.place.offset, tensor.dtype.label, tensor.shape)


@dataclass(frozen=True, slots=True)
class DeviceAnswer(LocalAnswer):
    """An answer whose tensors lie in the memory of a device.

    Attributes:
        arena: that they lie in.
        blocks_on_device: where each does.
    """

    arena: DeviceArena | None = None
    blocks_on_device: Mapping[str, DeviceBlock] = field(default_factory=dict)

    def _tensor(self, name: str, located: Located) -> HostTensor:
        dtype, block = DTYPES.get(located.dtype), self.blocks_on_device.get(name)
        if dtype is None or block is None or self.arena is None:
            raise UnexpectedAnswerError("the answer's results must be those that were requested, they are not")
        if prod(located.shape) * dtype.itemsize > block.place.nbytes:
            raise UnexpectedAnswerError(f"the answer's {quoted(name, 64)} must fit into its place, it does not")
        return OnDevice(dtype, self.arena.tensor(block, dtype, located.shape))


def understood_on_device(told: frames.Answer, arena: DeviceArena, blocks: Mapping[str, DeviceBlock]) -> LocalAnswer:
    """The protocol's answer as that of a call."""
    if told.status >= 400:
        return understood(told, {})
    return DeviceAnswer(told.status, {}, memoryview(b""), told, {}, arena, blocks)


def growth_on_device(lacking: int, nbytes: int) -> list[int]:
    """As `messages.growth`, of memory whose every segment takes a millisecond to come."""
    return [max(lacking, min(max(nbytes, _LEAST_GROWTH), _MOST_GROWTH)), lacking]
