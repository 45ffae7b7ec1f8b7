"""Known calls, which are repeated from a cached message without being built anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from normserve.client.local.array_memory import AllocatedBlock
from normserve.client.local.call_messages import make_timing
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import SegmentRange, TensorReference
from normserve.errors import MalformedPayloadError

# So many ranges that a call had for copies and results are allocated again, if they are free: the server answers
# a request fastest that has the same bytes as an earlier one, and the next call, whose inputs are these results, is
# the same, too.
_MOST_PLACES = 4

# Of encoded results: those of a call have some hundred bytes, unless its server fills them up.
_MAX_CACHED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """A tensor of a call that is copied into shared memory.

    Attributes:
        name: the tensor's name in the API.
        make_copy_target: as `SharedArrayMemory.make_copy_target` of a range.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make_copy_target: Callable[[SegmentRange], Any]

    def make_reference(self, place: SegmentRange) -> TensorReference:
        return TensorReference(place.segment, place.offset, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ResultField:
    """A tensor of a call's result.

    Attributes:
        name: the tensor's name in the API, and that of the result's field.
        field_index: the position of that field.
        make_array: makes the tensor in a block.
    """

    name: str
    field_index: int
    dtype: str
    shape: tuple[int, ...]
    make_array: Callable[[Any], Any]


@dataclass(slots=True)
class EncodedCall:
    """The encoded message of a call with certain ranges for its copies and results.

    Attributes:
        segment_ranges: the ranges of the copies, then those of the results.
        content: the message, encoded.
        copy_targets: the targets of the copies.
        encoded_results: the encoded results of the last valid response; a response with the same bytes is valid,
            too.
    """

    segment_ranges: Sequence[SegmentRange]
    content: msgspec.Raw
    copy_targets: Sequence[Any]
    encoded_results: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A known call: its message and the layout of its result.

    Attributes:
        message: without copied tensors, and without ranges for the results.
        result_type: the dataclass of the call's result.
        field_count, timing_index: how many fields the result has, and the position of `timing` among them.
        copied_inputs: the tensors that are copied.
        results: the tensors in the result.
        block_sizes: bytes of each copy, then of each result.
        encoded_calls: the call as sent with different ranges, the newest at the end.
    """

    message: frames.ComputeMessage
    result_type: Callable[..., Any]
    field_count: int
    timing_index: int
    copied_inputs: Sequence[CopiedInput]
    results: Sequence[ResultField]
    block_sizes: Sequence[int]
    encoded_calls: list[EncodedCall] = field(default_factory=list)

    def encode_at(self, places: Sequence[SegmentRange]) -> EncodedCall:
        """Encode the call with these ranges for copies and results, and keep the encoded call."""
        count = len(self.copied_inputs)
        copies = {
            each.name: each.make_reference(place)
            for each, place in zip(self.copied_inputs, places[:count], strict=True)
        }
        named = {result.name: place for result, place in zip(self.results, places[count:], strict=True)}
        tensors = self.message.tensors | copies
        message = msgspec.structs.replace(self.message, tensors=tensors, results=named)
        targets = [
            copied.make_copy_target(place) for copied, place in zip(self.copied_inputs, places[:count], strict=True)
        ]
        encoded_call = EncodedCall(places, msgspec.Raw(msgspec.json.encode(message)), targets)
        if len(self.encoded_calls) >= _MOST_PLACES:
            del self.encoded_calls[0]
        self.encoded_calls.append(encoded_call)
        return encoded_call

    def has_same_results(self, response: frames.LazyLocalResponse) -> bool:
        """Return whether a response has results of the cached names, dtypes and shapes."""
        try:
            located = frames.decode_results(response)
        except MalformedPayloadError:
            return False
        found = {name: (each.dtype, each.shape) for name, each in located.items()}
        return found == {result.name: (result.dtype, result.shape) for result in self.results}


class PendingCachedCall:
    """A repeated call in progress, which keeps the blocks of its copies and results.

    Attributes:
        content: the message, encoded.
    """

    __slots__ = ("_blocks", "_call", "_encoded_call", "_fields", "content")

    def __init__(self, call: CachedCall, blocks: Sequence[AllocatedBlock], encoded_call: EncodedCall) -> None:
        self._call = call
        self._blocks = blocks
        self._encoded_call = encoded_call
        self._fields: list[Any] = [None] * call.field_count
        self.content = encoded_call.content

    def copy_inputs(
        self, elsewhere: Mapping[str, Any], copy: Callable[[Sequence[Any], Sequence[Any]], None]
    ) -> None:
        """Copy the call's tensors from outside shared memory to their ranges.

        Args: copy: as `SharedArrayMemory.copy_all`.
        """
        copy(self._encoded_call.copy_targets, [elsewhere[copied.name] for copied in self._call.copied_inputs])

    def make_result_arrays(self) -> None:
        """Make the arrays of the results, while the server computes their contents."""
        made, call, blocks = self._fields, self._call, self._blocks
        if call.copied_inputs:
            blocks = blocks[len(call.copied_inputs) :]
        for result, block in zip(call.results, blocks, strict=True):
            made[result.field_index] = result.make_array(block)

    def make_result(self, response: frames.LazyLocalResponse) -> Any:
        """Return the call's result; None where the response's results differ from the cached ones."""
        call = self._call
        if response.status != 200:
            return None
        if response.results != self._encoded_call.encoded_results:
            if not call.has_same_results(response):
                return None
            # A copy, because the raw results keep the entire response.
            results = bytes(response.results)
            if len(results) <= _MAX_CACHED_BYTES:
                self._encoded_call.encoded_results = msgspec.Raw(results)
        self._fields[call.timing_index] = make_timing(response)
        return call.result_type(*self._fields)
