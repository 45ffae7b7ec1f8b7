"""Conversion of calls to protocol messages, and of the responses back."""

import functools
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np

from normserve.client.calls.api_call import ApiCall
from normserve.client.errors import ApiError, UnexpectedAnswerError
from normserve.client.local.allocator import ArenaBlock, HostArena
from normserve.client.quoting import sanitise_text
from normserve.client.responses.api_errors import make_api_error
from normserve.client.responses.api_response import ApiResponse
from normserve.client.results import Timing
from normserve.client.trace_context import get_current_traceparent
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import Message, SegmentRange, TensorReference
from normserve.errors import MalformedPayloadError
from normserve.memory.tensors import DType, HostTensor

MISFIT_STATUS = 422
"""The status of requests whose tensors, layer or ranges for results do not fit one another."""

_LAYERS = "/v1/layers"
DTYPES = {dtype.value: dtype for dtype in DType}
_STAGES = {"recv", "queue", "copy_in", "kernel", "copy_out"}
_EMPTY = memoryview(bytearray())
_BACKWARD = "/backward"

_LEAST_GROWTH, _MOST_GROWTH = 4 * 2**20, 64 * 2**20

_R = TypeVar("_R")

HostArenaSteps = Generator[int, None, _R]
"""A generator that yields the bytes that the arena lacks, and returns a value once they are allocated."""


@dataclass(frozen=True, slots=True)
class HostCallMessage:
    """The message of a call, and the host memory that its copied tensors and its results use.

    Attributes:
        copied_inputs: blocks with copies of tensors from outside the arena.
        result_blocks: the block of each result, by name.
    """

    message: Message
    copied_inputs: list[ArenaBlock] = field(default_factory=list)
    result_blocks: Mapping[str, ArenaBlock] = field(default_factory=dict)


def prepare_host_call(call: ApiCall[Any], arena: HostArena) -> HostArenaSteps[HostCallMessage]:
    """Put a call's tensors into shared host memory, allocate memory for its results, and build its message.

    Tensors that are in shared memory already are not copied.  Where there is no space, the generator yields
    the number of bytes, and continues after the caller has added memory.

    Raises:
        ValueError: a tensor is in column-major order, or its memory of another size than its shape asks for.
    """
    inputs: list[ArenaBlock] = []
    located = {}
    for name, tensor in (call.tensors or {}).items():
        nbytes = _count_checked_bytes(name, tensor)
        found = arena.locate(tensor.data) if nbytes else None
        if found is None:
            block = yield from allocate_host_block(arena, nbytes)
            if nbytes:
                block[:nbytes] = np.frombuffer(tensor.data, np.uint8)
            inputs.append(block)
            found = block.segment_range.segment, block.segment_range.offset
        located[name] = TensorReference(*found, tensor.dtype.label, tensor.shape)
    if call.expected_results is None:
        return HostCallMessage(_make_administration_message(call, located), inputs)
    results, places = {}, {}
    for name, output in call.expected_results.items():
        # Inlined `allocate_host_block`, without a generator of its own: there is space except at first.
        while (room := arena.allocate(output.allocated_bytes)) is None:
            yield output.allocated_bytes
        results[name], places[name] = room, room.segment_range
    return HostCallMessage(make_compute_message(call, located, places), inputs, results)


def make_compute_message(
    call: ApiCall[Any], located: dict[str, TensorReference], places: dict[str, SegmentRange]
) -> frames.ComputeMessage:
    """Make the message that requests an operation.

    Args:
        located: the locations of the call's tensors, by name.
        places: the memory ranges of its results, by name.
    """
    op, direction = _parse_operation(call.path)
    return frames.ComputeMessage(op, located, places, direction, call.encoded_query)


def add_traceparent(message: Message | msgspec.Raw) -> Message | msgspec.Raw:
    """Add the caller's current trace span, if there is one, to the message of an operation; return the message.

    Other messages are returned unchanged.

    Args: message: a `msgspec.Raw` is an encoded operation.
    """
    traceparent = get_current_traceparent()
    if traceparent is None:
        return message
    if isinstance(message, msgspec.Raw):
        return msgspec.Raw(b'%b,"traceparent":"%b"}' % (bytes(message)[:-1], traceparent.encode("ascii")))
    if isinstance(message, frames.ComputeMessage):
        return msgspec.structs.replace(message, traceparent=traceparent)
    return message


@functools.lru_cache(maxsize=64)
def _parse_operation(path: str) -> tuple[str, str]:
    """Parse a path into the operation's name and the pass."""
    op = path.removeprefix("/v1/")
    return (op.removesuffix(_BACKWARD), "backward") if op.endswith(_BACKWARD) else (op, "forward")


def _make_administration_message(call: ApiCall[Any], located: Mapping[str, TensorReference]) -> Message:
    name = unquote(call.path.removeprefix(_LAYERS + "/"))
    match call.method, call.path:
        case "GET", "/v1/info":
            return frames.GetInfoMessage()
        case "GET", path if path == _LAYERS:
            return frames.ListLayersMessage()
        case "GET", _:
            return frames.GetLayerMessage(name)
        case "DELETE", _:
            return frames.DeleteLayerMessage(name)
        case _:
            return frames.PutLayerMessage(name, call.encoded_query, dict(located))


def _count_checked_bytes(name: str, tensor: HostTensor) -> int:
    """Check that a tensor is row-major and as long as its shape requires; return its number of bytes.

    Raises:
        ValueError: the tensor is not.
    """
    if tensor.fortran_order:
        raise ValueError(f"{name} must be row-major")
    nbytes = tensor.data.nbytes
    if nbytes != tensor.nbytes:
        raise ValueError(f"{name} must have {tensor.nbytes} bytes, got {nbytes}")
    return nbytes


def allocate_host_block(arena: HostArena, nbytes: int) -> HostArenaSteps[ArenaBlock]:
    """Allocate a block of shared host memory.

    While there is no space, the generator yields the number of bytes, for the caller to add memory.
    """
    while (block := arena.allocate(nbytes)) is None:
        yield nbytes
    return block


@dataclass(frozen=True, slots=True)
class ArenaResponse(ApiResponse):
    """A response over shared memory, whose tensors are in blocks of shared host memory."""

    local_response: frames.LocalResponse = field(default_factory=lambda: frames.LocalResponse(0))
    result_blocks: Mapping[str, ArenaBlock] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        references = self._decode_references().values()
        return sum(prod(each.shape) * DTYPES[each.dtype].itemsize for each in references if each.dtype in DTYPES)

    def list_payload_buffers(self) -> list[memoryview]:
        """Return the buffer of each result.

        Raises:
            UnexpectedAnswerError: the response describes results that cannot be.
        """
        return [tensor.data for tensor in self.read_tensors().values()]

    def parse_json(self) -> Any:
        """Return the response's document, which is parsed already."""
        return self.local_response.document

    def read_tensors(self) -> dict[str, HostTensor]:
        """Return the results as views of shared memory, each of which keeps its block allocated.

        Raises:
            UnexpectedAnswerError: the response describes results that cannot be.
        """
        return {name: self._view_result(name, each) for name, each in self._decode_references().items()}

    def read_timing(self) -> Timing:
        """Return the timing in the response."""
        return make_timing(self.local_response)

    def _decode_references(self) -> dict[str, TensorReference]:
        """Return the dtype, shape and location of each result, as the response describes them.

        Raises:
            UnexpectedAnswerError: the description is malformed.
        """
        try:
            return frames.decode_results(self.local_response)
        except MalformedPayloadError as error:
            raise UnexpectedAnswerError(f"the server sent a malformed answer: {error}") from None

    def _view_result(self, name: str, located: TensorReference) -> HostTensor:
        """Return a result as a view of its block, after a check that it was requested and fits into the block.

        Raises:
            UnexpectedAnswerError: the check failed.
        """
        dtype, block = DTYPES.get(located.dtype), self.result_blocks.get(name)
        if dtype is None or block is None:
            raise UnexpectedAnswerError("the answer's results must be those that were requested, they are not")
        nbytes = prod(located.shape) * dtype.itemsize
        if nbytes > block.segment_range.nbytes:
            raise UnexpectedAnswerError(f"the answer's {name} must fit into its place, it does not")
        # Through a memoryview, so that whatever is made of it keeps the block itself.
        return HostTensor(dtype, located.shape, block.data[:nbytes] if nbytes else _EMPTY)


def make_timing(response: frames.LocalResponse) -> Timing:
    """Return the server's timing from a response; its fields are computed at the first access."""
    # Only these fields, so that the response itself is not kept.
    field_values = (
        response.stages_ms,
        response.kernel_bytes,
        response.kernel_bandwidth,
        response.batch_size,
        response.request_id,
    )
    return Timing.later(_read_timing_fields, field_values)


def _read_timing_fields(
    stages: dict[str, float], kernel_bytes: int, bandwidth: float, batch_size: int, request_id: str
) -> tuple[Mapping[str, float], int, float, int, str]:
    """Return the fields of a `Timing`, in order, with the server's invalid values left out or corrected.

    Negative durations are left out, and texts are made short and printable.
    """
    if stages.keys() != _STAGES or min(stages.values()) < 0:
        stages = {sanitise_text(name, 64): stage_ms for name, stage_ms in stages.items() if stage_ms >= 0}
    return stages, kernel_bytes, max(0.0, bandwidth), max(1, batch_size), sanitise_text(request_id, 128)


def make_arena_response(response: frames.LocalResponse, blocks: Mapping[str, ArenaBlock]) -> ArenaResponse:
    """Convert a response of the shared-memory protocol to an `ApiResponse`.

    An error gets the headers and the body that it has over HTTP.

    Args: blocks: the memory of each result, by name.
    """
    if response.status < 400:
        return ArenaResponse(response.status, {}, _EMPTY, response, blocks)
    headers = {"x-request-id": response.request_id}
    if response.retry_after_s is not None:
        headers["retry-after"] = str(response.retry_after_s)
    return ArenaResponse(response.status, headers, memoryview(json.dumps(response.problem).encode()), response)


def raise_for_status(response: frames.LocalResponse) -> None:
    """Raise ApiError if the response is an error."""
    # In no name of this frame, which the error holds: a ring would keep the blocks of all frames above.
    if response.status >= 400:
        raise make_local_api_error(response)


def make_local_api_error(response: frames.LocalResponse) -> ApiError:
    """Make the error of a response with a status of 400 or above."""
    refused = make_arena_response(response, {})
    return make_api_error(refused.status, refused.headers, bytes(refused.body))


def list_segment_sizes(lacking: int, nbytes: int) -> list[int]:
    """Return the sizes to try in turn for a new segment when an arena of `nbytes` lacks `lacking` bytes."""
    lacking += -lacking % 4096
    return [max(lacking, min(max(nbytes, _LEAST_GROWTH), _MOST_GROWTH)), lacking]
