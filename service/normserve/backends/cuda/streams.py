"""Three stages on three streams: while one batch is computed, the next is copied in and the previous one out.

This module keeps the order.  The stages, streams and events themselves belong to the caller.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol


class Event(Protocol):
    """A moment on a stream, as of CUDA."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Stream(Protocol):
    """What is put on it happens in turn, as of CUDA."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """Where streams and events come from."""

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Work of this thread is put on that stream inside; afterwards on any."""


class StageSeconds(NamedTuple):
    """How long each stage took on the device, without its wait for the one before.

    Of a batch in several parts, `copy_out` is what came after the last part was copied in, without `compute`.
    """

    copy_in: float
    compute: float
    copy_out: float


class Flight:
    """A batch that is on its way through the stages.

    Attributes:
        value: what the last stage gave; its memory is written to until `wait` returns.
    """

    def __init__(
        self,
        value: Any,
        spans: list[list[tuple[Event, Event]]],
        held: list[Any],
        marks: list[Event],
        spare: list[Event],
    ) -> None:
        """Args: spans: of each stage the begin and the end of each of its parts."""
        self.value = value
        self._spans = spans
        self._held = held
        self._marks = marks
        self._spare = spare
        self._has_landed = False

    def lands_within(self, seconds: float) -> bool:
        """Watch for the end of the last stage, for so long at most; whether it is over."""
        self._has_landed = _passes_within(self._marks[-1], seconds)
        return self._has_landed

    def wait(self) -> StageSeconds:
        """Block until the last stage is over, and let go of what the stages worked on; called once."""
        if not self._has_landed:
            self._marks[-1].synchronize()
        self._held.clear()
        took = self._took()
        self._spare.extend(self._marks)
        return took

    def _took(self) -> StageSeconds:
        copies_in, computed, copies_out = self._spans
        compute_s = sum([_seconds(*span) for span in computed])
        if len(computed) == 1:
            return StageSeconds(_seconds(*copies_in[0]), compute_s, _seconds(*copies_out[0]))
        # Stages of several parts overlap: the last one gets what is left, so that the sum is the whole.
        copy_in_s = _seconds(copies_in[0][0], copies_in[-1][1])
        whole_s = _seconds(self._marks[0], self._marks[-1])
        return StageSeconds(copy_in_s, compute_s, max(0.0, whole_s - copy_in_s - compute_s))


class LoneFlight:
    """A batch that is computed where it lies: one stage, between two events.

    Attributes:
        value: what the stage gave; its memory is written to until `wait` returns.
    """

    __slots__ = ("_began", "_ended", "_has_landed", "_held", "_spare", "value")

    def __init__(self, value: Any, held: Any, began: Event, ended: Event, spare: list[Event]) -> None:
        """Args: held: what the stage works on."""
        self.value = value
        self._held = held
        self._began, self._ended = began, ended
        self._spare = spare
        self._has_landed = False

    def lands_within(self, seconds: float) -> bool:
        """Watch for its end, for so long at most; whether it is over."""
        self._has_landed = _passes_within(self._ended, seconds)
        return self._has_landed

    def wait(self) -> StageSeconds:
        """Block until it is over, and let go of what it worked on; called once."""
        if not self._has_landed:
            self._ended.synchronize()
        self._held = None
        took = self._began.elapsed_time(self._ended) / 1000
        self._spare += (self._began, self._ended)
        return StageSeconds(0.0, took, 0.0)


class Pipeline:
    """The streams of one lane."""

    def __init__(self, streams: Streams, *, apart: bool = True) -> None:
        """Args: apart: each stage has a stream of its own; else all share one, which starts sooner."""
        self._source = streams
        self._streams = [streams.stream() for _ in range(3)] if apart else [streams.stream()] * 3
        # Events of flights that are over; whoever waited for one adds its own.
        self._spare: list[Event] = []

    def start(self, *stages: Callable[[Any], Any], firsts: Sequence[Any] = (None,), held: Any = None) -> Flight:
        """Put copy-in, compute and copy-out on their streams, each after the one before it; blocks for none.

        Args:
            stages: each is called with what the one before it gave.  What they gave stays alive until the flight is
                over: a device's allocator knows one stream for each block of memory, so a block may be given back
                only when no stream uses it.
            firsts: for each part of the batch what the first stage is called with; the parts follow one another on
                each stream.
            held: stays alive, too.
        """
        kept = [held]
        spans: list[list[tuple[Event, Event]]] = [[] for _ in stages]
        marks: list[Event] = []
        try:
            for first in firsts:
                self._put(stages, first, spans, marks, kept)
        except BaseException:
            self._settle()
            raise
        return Flight(kept[-1], spans, kept, marks, self._spare)

    def _put(
        self,
        stages: Sequence[Callable[[Any], Any]],
        value: Any,
        spans: list[list[tuple[Event, Event]]],
        marks: list[Event],
        kept: list[Any],
    ) -> None:
        """Put one part on the streams, and add its spans and marks and what its stages gave."""
        current: Stream | None = None
        for stream, stage, own in zip(self._streams, stages, spans, strict=True):
            with self._source.use(stream):
                if stream is not current:
                    if current is not None:
                        stream.wait_event(marks[-1])
                    current = stream
                    marks.append(self._mark(stream))
                value = stage(value)
                kept.append(value)
                marks.append(self._mark(stream))
                own.append((marks[-2], marks[-1]))

    def start_one(self, stage: Callable[[Any], Any], first: Any) -> LoneFlight:
        """Put a compute stage alone on its stream; as `start` with nothing to copy, in half of its steps."""
        stream = self._streams[1]
        try:
            with self._source.use(stream):
                began = self._mark(stream)
                value = stage(first)
                ended = self._mark(stream)
        except BaseException:
            self._settle()
            raise
        return LoneFlight(value, (first, value), began, ended, self._spare)

    def aside(self, work: Callable[[], object]) -> None:
        """Do something with the compute stage's stream as the thread's own, in no flight's time."""
        with self._source.use(self._streams[1]):
            work()

    def _mark(self, stream: Stream) -> Event:
        event = self._spare.pop() if self._spare else self._source.event()
        event.record(stream)
        return event

    def _settle(self) -> None:
        """What was put on the streams may still write to memory that the caller is about to give back."""
        for stream in self._streams:
            # The error that is on its way says more than the same device's next.
            with contextlib.suppress(Exception):
                stream.synchronize()


def _seconds(began: Event, ended: Event) -> float:
    return began.elapsed_time(ended) / 1000


def _passes_within(event: Event, seconds: float) -> bool:
    """Watch for an event, for so long at most; whether it is over."""
    if event.query():
        return True
    give_up = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() >= give_up:
            return False
    return True
