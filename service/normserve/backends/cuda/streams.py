"""Three stages on three streams: while one batch is computed, the next is copied in and the previous one out.

This module keeps the order.  The stages, streams and events themselves belong to the caller.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

_P = TypeVar("_P")


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
    """How long each stage took on the device, without its wait for the one before."""

    copy_in: float
    compute: float
    copy_out: float


class AnyFlight(ABC):
    """A batch on the device, which has landed once its last event is over."""

    __slots__ = ("_ended", "_has_landed", "_held", "_spare")

    def __init__(self, held: object, ended: Event, spare: list[Event]) -> None:
        """Args:
        held: what the stages work on.
        ended: the end of all of them.
        spare: takes the events once they are over.
        """
        self._held = held
        self._ended = ended
        self._spare = spare
        self._has_landed = False

    def lands_within(self, seconds: float) -> bool:
        """Watch for its end, for so long at most; whether it is over."""
        self._has_landed = _passes_within(self._ended, seconds)
        return self._has_landed

    def wait(self) -> StageSeconds:
        """Block until it is over, and release what it worked on; called once."""
        if not self._has_landed:
            self._ended.synchronize()
        self._held = None
        return self._took()

    @abstractmethod
    def _took(self) -> StageSeconds:
        """Read the events and give them back."""


class Flight(AnyFlight):
    """A batch that is on its way through the stages.

    Attributes:
        value: what the last stage gave; its memory is written to until `wait` returns.
    """

    __slots__ = ("_marks", "_spans", "value")

    def __init__(
        self,
        value: Any,
        spans: list[tuple[Event, Event]],
        held: list[Any],
        marks: list[Event],
        spare: list[Event],
    ) -> None:
        super().__init__(held, marks[-1], spare)
        self.value = value
        self._spans = spans
        self._marks = marks

    def _took(self) -> StageSeconds:
        took = [began.elapsed_time(ended) / 1000 for began, ended in self._spans]
        self._spare.extend(self._marks)
        return StageSeconds(*took)


class DividedFlight(AnyFlight):
    """A batch that is on its way through the stages in parts, whose stages overlap.

    Copy-in lasts until the last part has come; copy-out is what is left of the whole, so that the sum is the whole.
    """

    __slots__ = ("_began", "_came", "_computed")

    def __init__(
        self, began: Event, came: list[Event], computed: list[Event], ended: Event, held: object, spare: list[Event]
    ) -> None:
        """Args: came, computed: the end of copy-in and of compute of each part."""
        super().__init__(held, ended, spare)
        self._began = began
        self._came, self._computed = came, computed

    def _took(self) -> StageSeconds:
        compute_s = before = 0.0
        for came, computed in zip(self._came, self._computed, strict=True):
            done = self._after(computed)
            compute_s += done - max(before, self._after(came))
            before = done
        copy_in_s = self._after(self._came[-1])
        copy_out_s = max(0.0, self._after(self._ended) - copy_in_s - compute_s)
        self._spare += (self._began, *self._came, *self._computed, self._ended)
        return StageSeconds(copy_in_s, compute_s, copy_out_s)

    def _after(self, event: Event) -> float:
        """Seconds from the beginning on."""
        return self._began.elapsed_time(event) / 1000


class LoneFlight(AnyFlight):
    """A batch that is computed where it lies: one stage, between two events.

    Attributes:
        value: what the stage gave; its memory is written to until `wait` returns.
    """

    __slots__ = ("_began", "value")

    def __init__(self, value: Any, held: object, began: Event, ended: Event, spare: list[Event]) -> None:
        """Args: held: what the stage works on."""
        super().__init__(held, ended, spare)
        self.value = value
        self._began = began

    def _took(self) -> StageSeconds:
        took = self._began.elapsed_time(self._ended) / 1000
        self._spare += (self._began, self._ended)
        return StageSeconds(0.0, took, 0.0)


class Pipeline:
    """The streams of one lane."""

    def __init__(self, streams: Streams, *, apart: bool = True) -> None:
        """Args: apart: each stage has a stream of its own; else all share one, which starts sooner."""
        self._source = streams
        self._streams = [streams.stream() for _ in range(3)] if apart else [streams.stream()] * 3
        # Events of flights that are over; `wait` adds them.
        self._spare: list[Event] = []

    @property
    def compute_stream(self) -> Any:
        """The compute stage's stream."""
        return self._streams[1]

    def start(self, *stages: Callable[[Any], Any], first: Any = None) -> Flight:
        """Put copy-in, compute and copy-out on their streams, each after the one before it; blocks for none.

        Args:
            stages: each is called with what the one before it gave, `first` the first.  What they gave stays alive
                until the flight is over: a device's allocator knows one stream for each block of memory, so a block
                may be given back only when no stream uses it.
        """
        held = [first]
        spans: list[tuple[Event, Event]] = []
        marks: list[Event] = []
        current: Stream | None = None
        try:
            for stream, stage in zip(self._streams, stages, strict=True):
                with self._source.use(stream):
                    if stream is not current:
                        current = stream
                        if marks:
                            stream.wait_event(marks[-1])
                        marks.append(self._mark(stream))
                    held.append(stage(held[-1]))
                    marks.append(self._mark(stream))
                    spans.append((marks[-2], marks[-1]))
        except BaseException:
            self._settle()
            raise
        return Flight(held[-1], spans, held, marks, self._spare)

    def start_parts(self, *stages: Callable[[_P], object], parts: Iterable[_P], held: object) -> DividedFlight:
        """Put copy-in, compute and copy-out of each part on their streams; blocks for none.

        While a part is copied in, the one before it is copied out.

        Args:
            stages: each is called with every part.
            held: stays alive until the flight is over; what the stages work on.
        """
        copy_in, compute, copy_out = stages
        on_way_in, on_device, on_way_out = self._streams
        came, computed = [], []
        try:
            with self._source.use(on_way_in):
                began = self._mark(on_way_in)
            for part in parts:
                with self._source.use(on_way_in):
                    copy_in(part)
                    came.append(self._mark(on_way_in))
                with self._source.use(on_device):
                    on_device.wait_event(came[-1])
                    compute(part)
                    computed.append(self._mark(on_device))
                with self._source.use(on_way_out):
                    on_way_out.wait_event(computed[-1])
                    copy_out(part)
            with self._source.use(on_way_out):
                ended = self._mark(on_way_out)
        except BaseException:
            self._settle()
            raise
        return DividedFlight(began, came, computed, ended, held, self._spare)

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


def _passes_within(event: Event, seconds: float) -> bool:
    """Watch for an event, for so long at most; whether it is over."""
    if event.query():
        return True
    give_up = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() >= give_up:
            return False
    return True
