"""Conversion of calls with tensors on a device to protocol messages, and of the responses back."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from normserve.client.calls.api_call import ApiCall
from normserve.client.calls.array_conversion import TorchCudaTensor
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.local.call_messages import DTYPES, ArenaResponse, make_arena_response, make_compute_message
from normserve.client.local.device_arena import BusyStream, DeviceArena, DeviceBlock
from normserve.client.quoting import sanitise_text
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import Message, TensorReference
from normserve.memory.tensors import HostTensor

_LEAST_GROWTH, _MOST_GROWTH = 64 * 2**20, 256 * 2**20

_R = TypeVar("_R")

DeviceArenaSteps = Generator[int | BusyStream, None, _R]
"""A generator that yields the bytes that the arena lacks, or a stream to wait for, and returns a value."""


@dataclass(frozen=True, slots=True)
class DeviceCallMessage:
    """The message of a call, and the device memory that its tensors and results use.

    Attributes:
        retained_inputs: objects that keep the memory that the server reads allocated.
        result_blocks: the block of each result, by name.
    """

    message: Message
    retained_inputs: list[Any]
    result_blocks: Mapping[str, DeviceBlock]


def get_device_x(call: ApiCall[Any]) -> TorchCudaTensor | None:
    """Return the x of an operation's call if x is on a CUDA device; None for any other call."""
    if call.expected_results is None or call.tensors is None:
        return None
    x = call.tensors.get("x")
    return x if isinstance(x, TorchCudaTensor) else None


def prepare_device_call(call: ApiCall[Any], arena: DeviceArena) -> DeviceArenaSteps[DeviceCallMessage]:
    """Put a call's tensors into shared device memory, allocate memory for its results, and build its message.

    Tensors that are in shared memory already are not copied.  The generator yields the number of bytes for
    which there is no space, or a stream whose work must be finished before the server reads the tensors; it
    continues after the caller has added memory, or has waited.
    """
    assert call.tensors is not None
    assert call.expected_results is not None
    if busy := arena.find_busy_stream():
        yield busy
    copies: list[Any] = []
    located = {}
    for name, tensor in call.tensors.items():
        located[name] = yield from _place_tensor(tensor, arena, copies)
    results = {}
    for name, output in call.expected_results.items():
        results[name] = yield from allocate_device_block(arena, output.allocated_bytes)
    if copies and (busy := arena.find_busy_stream()):
        yield busy
    places = {name: block.segment_range for name, block in results.items()}
    return DeviceCallMessage(make_compute_message(call, located, places), copies, results)


def allocate_device_block(arena: DeviceArena, nbytes: int) -> DeviceArenaSteps[DeviceBlock]:
    """Allocate a block of shared device memory.

    While there is no space, the generator yields the number of bytes, for the caller to add memory.
    """
    while (block := arena.allocate(nbytes)) is None:
        yield nbytes
    return block


def _place_tensor(tensor: HostTensor, arena: DeviceArena, retained: list[Any]) -> DeviceArenaSteps[TensorReference]:
    """Return a tensor's location in shared device memory; copy the tensor there if it is elsewhere.

    Args: retained: receives the objects that keep the copy's memory allocated.
    """
    source = tensor.view_tensor if isinstance(tensor, TorchCudaTensor) else None
    if source is not None and source.device.index == arena.ordinal:
        found = arena.locate_tensor(source)
        if found is not None:
            return TensorReference(*found, tensor.dtype.label, tensor.shape)
    block = yield from allocate_device_block(arena, tensor.nbytes)
    there = arena.make_tensor(block, tensor.dtype, tensor.shape)
    arena.copy_into(there, tensor.data if source is None else source)
    # Of no elements there is nothing that would keep the block.
    retained += (block, there)
    return TensorReference(
        block.segment_range.segment, block.segment_range.offset, tensor.dtype.label, tensor.shape
    )


@dataclass(frozen=True, slots=True)
class DeviceArenaResponse(ArenaResponse):
    """A response over shared memory, whose tensors are in blocks of shared device memory.

    Attributes:
        arena: the arena of the tensors.
        device_blocks: the block of each tensor, by name.
    """

    arena: DeviceArena | None = None
    device_blocks: Mapping[str, DeviceBlock] = field(default_factory=dict)

    def _view_result(self, name: str, located: TensorReference) -> HostTensor:
        """Return a result as a CUDA tensor over its block, after a check that it was requested and fits there.

        Raises:
            UnexpectedAnswerError: the check failed.
        """
        dtype, block = DTYPES.get(located.dtype), self.device_blocks.get(name)
        if dtype is None or block is None or self.arena is None:
            raise UnexpectedAnswerError("the answer's results must be those that were requested, they are not")
        if prod(located.shape) * dtype.itemsize > block.segment_range.nbytes:
            raise UnexpectedAnswerError(
                f"the answer's {sanitise_text(name, 64)} must fit into its place, it does not"
            )
        return TorchCudaTensor(dtype, self.arena.make_tensor(block, dtype, located.shape))


def make_device_response(
    response: frames.LocalResponse, arena: DeviceArena, blocks: Mapping[str, DeviceBlock]
) -> ArenaResponse:
    """Convert a response of the shared-memory protocol to an `ApiResponse`.

    An error gets the headers and the body that it has over HTTP.

    Args: blocks: the device memory of each result, by name.
    """
    if response.status >= 400:
        return make_arena_response(response, {})
    return DeviceArenaResponse(response.status, {}, memoryview(b""), response, {}, arena, blocks)


def list_device_segment_sizes(lacking: int, nbytes: int) -> list[int]:
    """Return the sizes to try in turn for a new segment when an arena of `nbytes` lacks `lacking` bytes.

    They are larger than for host memory, because each segment of device memory takes a millisecond to make.
    """
    return [max(lacking, min(max(nbytes, _LEAST_GROWTH), _MOST_GROWTH)), lacking]
