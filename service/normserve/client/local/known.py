"""Calls that were answered, and that are asked for again without being made anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from normserve.client.local.memories import AllocatedBlock
from normserve.client.local.messages import make_timing
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import SegmentRange, TensorReference
from normserve.errors import MalformedPayloadError

# So many places that a call had for copies and results are taken again, if they are free: the server answers
# soonest what it has been asked word for word, and the next call, which has these results for its tensors, is the
# same, too.
_MOST_PLACES = 4

# Of results as they are told: those of a call have some hundred bytes, unless its server fills them up.
_LONGEST_KEPT = 4096


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """A tensor of a call that is copied into shared memory.

    Attributes:
        name: in the API.
        make_copy_target: as `Memory.target` of a place.
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
        name: in the API, and of the field that holds it.
        field_index: of that field.
        make_array: makes it in a block.
    """

    name: str
    field_index: int
    dtype: str
    shape: tuple[int, ...]
    make_array: Callable[[Any], Any]


@dataclass(slots=True)
class EncodedCall:
    """A call with places for copies and results.

    Attributes:
        segment_ranges: of each of them.
        content: the message, encoded.
        copy_targets: of the copies.
        encoded_results: as the last answer that was understood told them, encoded; an answer that says the same is
            as good.
    """

    segment_ranges: Sequence[SegmentRange]
    content: msgspec.Raw
    copy_targets: Sequence[Any]
    encoded_results: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call that was answered once.

    Attributes:
        message: without copies, and without places for the results.
        result_type: of what the client makes of the answer, a dataclass.
        field_count, timing_index: how many fields that has, and the position of `timing_index`.
        copied_inputs: the tensors that are copied.
        results: the tensors in the result.
        block_sizes: bytes that each of the copies needs, and then each of the results.
        encoded_calls: what was sent, with several places for these, the last ones at the end.
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
        """The call with copies and results at places where they have not been lately."""
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
        """Whether an answer's results are what they were before."""
        try:
            located = frames.decode_results(told)
        except MalformedPayloadError:
            return False
        found = {name: (each.dtype, each.shape) for name, each in located.items()}
        return found == {result.name: (result.dtype, result.shape) for result in self.results}


class PendingCachedCall:
    """A call that is asked for again: what is sent, and what to make of the answer.  It keeps the memory of both.

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
        """Copy what the call's tensors hold that lie elsewhere.

        Args: copy: as `Memory.copy`.
        """
        copy(self._encoded_call.copy_targets, [elsewhere[copied.name] for copied in self._call.copied_inputs])

    def make_result_arrays(self) -> None:
        """Make the results' tensors, while the server computes what they hold."""
        made, known, blocks = self._fields, self._call, self._blocks
        if known.copied_inputs:
            blocks = blocks[len(known.copied_inputs) :]
        for result, block in zip(known.results, blocks, strict=True):
            made[result.field_index] = result.make_array(block)

    def make_result(self, told: frames.LazyLocalResponse) -> Any:
        """The call's result; None where the answer is not what it was before."""
        known = self._call
        if told.status != 200:
            return None
        if told.results != self._encoded_call.encoded_results:
            if not known.has_same_results(told):
                return None
            # A copy, because what was read keeps all of the answer.
            results = bytes(told.results)
            if len(results) <= _LONGEST_KEPT:
                self._encoded_call.encoded_results = msgspec.Raw(results)
        self._fields[known.timing_index] = make_timing(told)
        return known.result_type(*self._fields)
