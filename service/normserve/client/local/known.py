"""Known calls, which are repeated from a cached message without being built anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from normserve.client.local.memories import AllocatedBlock
from normserve.client.local.messages import make_timing
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import SegmentRange, TensorReference
from normserve.errors import MalformedPayloadError

# So many ranges that a call had for copies and results are allocated again, if they are free: the server answers
# a request fastest that has the same bytes as an earlier one, and the next call, whose inputs are these results, is
# the same, too.
_MOST_PLACES = 4

# Of encoded results: those of a call have some hundred bytes, unless its server fills them up.
_LONGEST_KEPT = 4096


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
        whole = msgspec.structs.replace(self.message, tensors=tensors, results=named)
        targets = [
            copied.make_copy_target(place) for copied, place in zip(self.copied_inputs, places[:count], strict=True)
        ]
        asked = EncodedCall(places, msgspec.Raw(msgspec.json.encode(whole)), targets)
        if len(self.encoded_calls) >= _MOST_PLACES:
            del self.encoded_calls[0]
        self.encoded_calls.append(asked)
        return asked

    def has_same_results(self, told: frames.LazyLocalResponse) -> bool:
        """Return whether a response has results of the cached names, dtypes and shapes."""
        try:
            located = frames.decode_results(told)
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

    def __init__(self, known: CachedCall, blocks: Sequence[AllocatedBlock], asked: EncodedCall) -> None:
        self._call = known
        self._blocks = blocks
        self._encoded_call = asked
        self._fields: list[Any] = [None] * known.field_count
        self.content = asked.content

    def copy_inputs(
        self, elsewhere: Mapping[str, Any], copy: Callable[[Sequence[Any], Sequence[Any]], None]
    ) -> None:
        """Copy the call's tensors from outside shared memory to their ranges.

        Args: copy: as `SharedArrayMemory.copy_all`.
        """
        copy(self._encoded_call.copy_targets, [elsewhere[copied.name] for copied in self._call.copied_inputs])

    def make_result_arrays(self) -> None:
        """Make the arrays of the results, while the server computes their contents."""
        made, known, blocks = self._fields, self._call, self._blocks
        if known.copied_inputs:
            blocks = blocks[len(known.copied_inputs) :]
        for result, block in zip(known.results, blocks, strict=True):
            made[result.field_index] = result.make_array(block)

    def make_result(self, told: frames.LazyLocalResponse) -> Any:
        """Return the call's result; None where the response's results differ from the cached ones."""
        known = self._call
        if told.status != 200:
            return None
        if told.results != self._encoded_call.encoded_results:
            if not known.has_same_results(told):
                return None
            # A copy, because the raw results keep the entire response.
            results = bytes(told.results)
            if len(results) <= _LONGEST_KEPT:
                self._encoded_call.encoded_results = msgspec.Raw(results)
        self._fields[known.timing_index] = make_timing(told)
        return known.result_type(*self._fields)
