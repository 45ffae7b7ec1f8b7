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
        target: as `Memory.target` of a place.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    target: Callable[[SegmentRange], Any]

    def at(self, place: SegmentRange) -> TensorReference:
        return TensorReference(place.segment, place.offset, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ResultField:
    """A tensor of a call's result.

    Attributes:
        name: in the API, and of the field that holds it.
        position: of that field.
        make: makes it in a block.
    """

    name: str
    position: int
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Any], Any]


@dataclass(slots=True)
class EncodedCall:
    """A call with places for copies and results.

    Attributes:
        places: of each of them.
        content: the message, encoded.
        targets: of the copies.
        results: as the last answer that was understood told them, encoded; an answer that says the same is as good.
    """

    places: Sequence[SegmentRange]
    content: msgspec.Raw
    targets: Sequence[Any]
    results: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call that was answered once.

    Attributes:
        message: without copies, and without places for the results.
        kind: of what the client makes of the answer, a dataclass.
        fields, timing: how many fields that has, and the position of `timing`.
        copied: the tensors that are copied.
        results: the tensors in the result.
        sizes: bytes that each of the copies needs, and then each of the results.
        asked: what was sent, with several places for these, the last ones at the end.
    """

    message: frames.ComputeMessage
    kind: Callable[..., Any]
    fields: int
    timing: int
    copied: Sequence[CopiedInput]
    results: Sequence[ResultField]
    sizes: Sequence[int]
    asked: list[EncodedCall] = field(default_factory=list)

    def at(self, places: Sequence[SegmentRange]) -> EncodedCall:
        """The call with copies and results at places where they have not been lately."""
        count = len(self.copied)
        copies = {each.name: each.at(place) for each, place in zip(self.copied, places[:count], strict=True)}
        named = {result.name: place for result, place in zip(self.results, places[count:], strict=True)}
        tensors = self.message.tensors | copies
        whole = msgspec.structs.replace(self.message, tensors=tensors, results=named)
        targets = [copied.target(place) for copied, place in zip(self.copied, places[:count], strict=True)]
        asked = EncodedCall(places, msgspec.Raw(msgspec.json.encode(whole)), targets)
        if len(self.asked) >= _MOST_PLACES:
            del self.asked[0]
        self.asked.append(asked)
        return asked

    def fits(self, told: frames.LazyLocalResponse) -> bool:
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

    __slots__ = ("_asked", "_blocks", "_fields", "_known", "content")

    def __init__(self, known: CachedCall, blocks: Sequence[AllocatedBlock], asked: EncodedCall) -> None:
        self._known = known
        self._blocks = blocks
        self._asked = asked
        self._fields: list[Any] = [None] * known.fields
        self.content = asked.content

    def copy(self, elsewhere: Mapping[str, Any], copy: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
        """Copy what the call's tensors hold that lie elsewhere.

        Args: copy: as `Memory.copy`.
        """
        copy(self._asked.targets, [elsewhere[copied.name] for copied in self._known.copied])

    def make_results(self) -> None:
        """Make the results' tensors, while the server computes what they hold."""
        made, known, blocks = self._fields, self._known, self._blocks
        if known.copied:
            blocks = blocks[len(known.copied) :]
        for result, block in zip(known.results, blocks, strict=True):
            made[result.position] = result.make(block)

    def result(self, told: frames.LazyLocalResponse) -> Any:
        """The call's result; None where the answer is not what it was before."""
        known = self._known
        if told.status != 200:
            return None
        if told.results != self._asked.results:
            if not known.fits(told):
                return None
            # A copy, because what was read keeps all of the answer.
            results = bytes(told.results)
            if len(results) <= _LONGEST_KEPT:
                self._asked.results = msgspec.Raw(results)
        self._fields[known.timing] = make_timing(told)
        return known.kind(*self._fields)
