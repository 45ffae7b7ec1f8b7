"""Three stages on three streams: while one batch is computed, the next is copied in and the previous one out.

This module keeps the order.  The stages, streams and events themselves belong to the caller.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from normserve.backends.cuda.in_flight import DividedFlight, Event, Flight, LoneFlight, Marks

_P = TypeVar("_P")


class Stream(Protocol):
    """What is put on it happens in turn, as of CUDA."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """Where streams and events come from."""

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def mark(self) -> Event:
        """An event that each replay of a graph records, if it was recorded in the graph's capture."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Work of this thread is put on that stream inside; afterwards on any."""


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

    def put_parts(self, *stages: Callable[[_P], object], parts: Sequence[_P], marks: Marks) -> None:
        """Put copy-in, compute and copy-out of each part on their streams.

        They come after all that the compute stage's stream has, and before all that it gets afterwards.  It is the
        thread's, before and after, and what is put on the three streams can be captured from it.

        Args:
            stages: each is called with every part.
            marks: of each part; from `marks`.
        """
        copy_in, compute, copy_out = stages
        on_way_in, on_device, on_way_out = self._streams
        begun = self._mark(on_device)
        on_way_in.wait_event(begun)
        on_way_out.wait_event(begun)
        passed = [begun]
        for part, (came, computed) in zip(parts, marks, strict=True):
            with self._source.use(on_way_in):
                copy_in(part)
                came.record(on_way_in)
                passed.append(self._mark(on_way_in))
            with self._source.use(on_device):
                on_device.wait_event(passed[-1])
                compute(part)
                computed.record(on_device)
                passed.append(self._mark(on_device))
            with self._source.use(on_way_out):
                on_way_out.wait_event(passed[-1])
                copy_out(part)
        passed.append(self._mark(on_way_out))
        on_device.wait_event(passed[-1])
        with self._source.use(on_device):
            # Waits that were put on a stream are for what an event was recorded after then.
            self._spare += passed

    def marks(self, count: int) -> Marks:
        """For so many parts."""
        return [(self._source.mark(), self._source.mark()) for _ in range(count)]

    def start_one(self, stage: Callable[[Any], Any], first: Any, marks: Marks = ()) -> LoneFlight:
        """Put a stage alone on the compute stage's stream; as `start` with nothing to copy, in half of its steps.

        Args: marks: that the stage records.
        """
        stream = self._streams[1]
        try:
            with self._source.use(stream):
                began = self._mark(stream)
                value = stage(first)
                ended = self._mark(stream)
        except BaseException:
            self._settle()
            raise
        return LoneFlight(value, (first, value), began, ended, self._spare, marks)

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
