"""Three stages on three streams: while one batch is computed, the next is copied in and the previous one out.

This module keeps the order.  What is copied and computed, and the streams and events themselves, belong to the
caller.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from normserve.backends.cuda.in_flight import PendingCudaLaunch, StageEvents, StreamEvent


class DeviceStream(Protocol):
    """What is put on it happens in turn, as of CUDA."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class StreamFactory(Protocol):
    """Where streams and events come from."""

    def make_stream(self) -> DeviceStream: ...
    def make_event(self) -> StreamEvent: ...
    def make_graph_event(self) -> StreamEvent:
        """An event that each replay of a graph records, if it was recorded in the graph's capture."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Work of this thread is put on that stream inside; afterwards on any."""


class StagedLaunch(Protocol):
    """One launch of a batch and its copies, each put on the thread's current stream, in this order."""

    def copy_in(self) -> None: ...
    def compute(self) -> None: ...
    def copy_out(self) -> None: ...


class StreamPipeline:
    """The streams of one lane."""

    def __init__(self, streams: StreamFactory, *, apart: bool = True) -> None:
        """Args: apart: each stage has a stream of its own; else all share one, which starts sooner."""
        self._factory = streams
        self._streams = [streams.make_stream() for _ in range(3)] if apart else [streams.make_stream()] * 3
        # Events of batches that are over; `PendingCudaLaunch.wait` adds them.
        self._spare_events: list[StreamEvent] = []

    @property
    def compute_stream(self) -> Any:
        """The compute stage's stream."""
        return self._streams[1]

    def start_launches(self, make_parts: Callable[[], Sequence[StagedLaunch]], held: object) -> PendingCudaLaunch:
        """Put copy-in, compute and copy-out of each part on their streams; blocks for none.

        While a part is copied in, the one before it is copied out.

        Args:
            make_parts: called once, with copy-in's stream as the thread's own.  The parts stay alive until the
                batch is over: a device's allocator knows one stream for each block of memory, so a block may be
                given back only when no stream uses it.
            held: stays alive until then as well.
        """
        on_way_in, _, on_way_out = self._streams
        events: list[StreamEvent] = []
        try:
            with self._factory.use(on_way_in):
                parts = make_parts()
                began = self._record_event(on_way_in, events)
            marks, leaving = self._enqueue_stages(parts, events, are_measured_apart=len(parts) == 1)
            with self._factory.use(on_way_out):
                ended = self._record_event(on_way_out, events)
        except BaseException:
            self._synchronise_streams()
            raise
        return PendingCudaLaunch(
            began, marks, leaving, ended, held=(held, parts), events=events, spare=self._spare_events
        )

    def enqueue_launches(self, parts: Sequence[StagedLaunch], replayed: Sequence[StageEvents]) -> None:
        """Put copy-in, compute and copy-out of each part on their streams.

        They come after all that the compute stage's stream has, and before all that it gets afterwards.  It is the
        thread's, before and after, and what is put on the three streams can be captured from it.

        Args: replayed: of each part; from `make_stage_events`.
        """
        on_way_in, on_device, on_way_out = self._streams
        events: list[StreamEvent] = []
        begun = self._record_event(on_device, events)
        on_way_in.wait_event(begun)
        on_way_out.wait_event(begun)
        self._enqueue_stages(parts, events, replayed=replayed)
        on_device.wait_event(self._record_event(on_way_out, events))
        with self._factory.use(on_device):
            # Waits that were put on a stream are for what an event was recorded after then.
            self._spare_events += events

    def start_single_stage(
        self, stage: Callable[[], object], held: object, marks: Sequence[StageEvents] = ()
    ) -> PendingCudaLaunch:
        """Put a stage alone on the compute stage's stream; as `start_launches` with nothing to copy, in half of its
        steps.

        Args:
            held: stays alive until the batch is over.
            marks: that the stage records.
        """
        stream = self._streams[1]
        events: list[StreamEvent] = []
        try:
            with self._factory.use(stream):
                began = self._record_event(stream, events)
                value = stage()
                ended = self._record_event(stream, events)
        except BaseException:
            self._synchronise_streams()
            raise
        return PendingCudaLaunch(
            began, marks, None, ended, held=(held, value), events=events, spare=self._spare_events
        )

    def make_stage_events(self, count: int) -> Sequence[StageEvents]:
        """For so many parts, which each replay of a graph records."""
        made = [(self._factory.make_graph_event(), self._factory.make_graph_event()) for _ in range(count)]
        return [StageEvents(arrived, arrived, computed) for arrived, computed in made]

    def run_on_compute_stream(self, work: Callable[[], object]) -> None:
        """Do something with the compute stage's stream as the thread's own, in no batch's time."""
        with self._factory.use(self._streams[1]):
            work()

    def _enqueue_stages(
        self,
        parts: Sequence[StagedLaunch],
        events: list[StreamEvent],
        *,
        are_measured_apart: bool = False,
        replayed: Sequence[StageEvents] = (),
    ) -> tuple[Sequence[StageEvents], StreamEvent | None]:
        """The stages of each part; their moments, and the beginning of the last copy-out.

        Args:
            events: takes those that are recorded.
            are_measured_apart: what a stage waits for on its stream, behind other batches, is not its time.
            replayed: recorded as well, for each part.
        """
        on_way_in, on_device, on_way_out = self._streams
        are_measured_apart = are_measured_apart and on_way_in is not on_device
        marks: list[StageEvents] = []
        leaving = None
        for number, part in enumerate(parts):
            with self._factory.use(on_way_in):
                part.copy_in()
                if replayed:
                    # Before what the next stage waits for: a capture ends with nothing that no stream waits for.
                    replayed[number].arrived.record(on_way_in)
                arrived = started = self._record_event(on_way_in, events)
            with self._factory.use(on_device):
                if on_device is not on_way_in:
                    on_device.wait_event(arrived)
                if are_measured_apart:
                    started = self._record_event(on_device, events)
                part.compute()
                if replayed:
                    replayed[number].computed.record(on_device)
                computed = self._record_event(on_device, events)
            with self._factory.use(on_way_out):
                if on_way_out is not on_device:
                    on_way_out.wait_event(computed)
                if are_measured_apart:
                    leaving = self._record_event(on_way_out, events)
                part.copy_out()
            marks.append(StageEvents(arrived, started, computed))
        return marks, leaving

    def _record_event(self, stream: DeviceStream, events: list[StreamEvent]) -> StreamEvent:
        event = self._spare_events.pop() if self._spare_events else self._factory.make_event()
        event.record(stream)
        events.append(event)
        return event

    def _synchronise_streams(self) -> None:
        """What was put on the streams may still write to memory that the caller is about to give back."""
        for stream in self._streams:
            # The error that is on its way says more than the same device's next.
            with contextlib.suppress(Exception):
                stream.synchronize()
