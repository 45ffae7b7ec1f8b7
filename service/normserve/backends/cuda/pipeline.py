"""Three stages on three streams: while a batch is computed, the next one is copied in and the previous one out.

This module keeps the order and measures the duration of each stage of a batch.  The caller defines the copies and
the computation, and the streams and events.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from normserve.backends.interface import PendingLaunch
from normserve.jobs.job import BatchResult
from normserve.memory.tensors import HostTensor


class StreamEvent(Protocol):
    """The interface of a CUDA event: a mark in the work of a stream, with the time at which it was reached.

    Attributes:
        cuda_event: the driver's handle, once the event has been recorded.
    """

    @property
    def cuda_event(self) -> int: ...

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceStream(Protocol):
    """The interface of a CUDA stream, whose work runs in order."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class StreamFactory(Protocol):
    """A factory of streams and events."""

    def make_stream(self) -> DeviceStream: ...
    def make_event(self) -> StreamEvent: ...
    def make_graph_event(self) -> StreamEvent:
        """Make an event that each replay of a graph records, if it was recorded in the graph's capture."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the thread's current one within the block; after the block, any stream may be current."""


class StagedLaunch(Protocol):
    """The interface of one launch with its copies; each method enqueues its stage on the thread's current stream.

    The methods are called in this order.
    """

    def copy_in(self) -> None: ...
    def compute(self) -> None: ...
    def copy_out(self) -> None: ...


class PartEvents(NamedTuple):
    """The events around the computation of one part of a batch.  A batch is copied and computed in one or more
    parts.

    Attributes:
        arrived: the end of its copy-in.
        started: the beginning of its computation; `arrived` where nothing else can delay it.
        computed: the end of its computation.
    """

    arrived: StreamEvent
    started: StreamEvent
    computed: StreamEvent


class StageSeconds(NamedTuple):
    """The seconds that a batch spends on the device in copy-in, computation and copy-out.

    The time in which a stage waits for the stage before is not counted.
    """

    copy_in: float
    compute: float
    copy_out: float


class PendingCudaLaunch(PendingLaunch):
    """A batch that was launched on the device, and ends when its last event has completed."""

    __slots__ = (
        "_begin_event",
        "_copy_out_event",
        "_end_event",
        "_events",
        "_has_filled_buffers",
        "_is_complete",
        "_kernel_bytes",
        "_packed_s",
        "_part_events",
        "_results",
        "_retained",
        "_spare_events",
    )

    def __init__(
        self,
        began: StreamEvent,
        parts: Sequence[PartEvents],
        leaving: StreamEvent | None,
        ended: StreamEvent,
        *,
        held: object,
        events: Sequence[StreamEvent],
        spare: list[StreamEvent],
    ) -> None:
        """Store the events.

        Args:
            parts: of the copied parts, in their order; empty if nothing is copied.
            leaving: the beginning of the last copy-out; None where that is the end of the last computation.
            held: the memory that the stages read and write until `wait` returns.
            events: those of them that are added to `spare` after the end.
        """
        self._begin_event, self._part_events, self._copy_out_event, self._end_event = began, parts, leaving, ended
        self._retained, self._events, self._spare_events = held, events, spare
        self._is_complete = False

    def set_results(
        self,
        outputs: tuple[Mapping[str, HostTensor], ...],
        kernel_bytes: tuple[int, ...],
        *,
        packed_s: float = 0.0,
        are_placed: bool,
    ) -> None:
        """Set the result tensors and byte counts that `wait` returns; called while the device still computes them.

        Args:
            packed_s: the time that it took to pack its tensors.
            are_placed: whether the results are written to the jobs' own result buffers.
        """
        self._results, self._kernel_bytes = outputs, kernel_bytes
        self._packed_s, self._has_filled_buffers = packed_s, are_placed

    @property
    def is_over(self) -> bool:
        """Whether `wait` has seen the end of the batch."""
        return self._retained is None

    def poll(self, seconds: float) -> bool:
        self._is_complete = _poll_event(self._end_event, seconds)
        return self._is_complete

    def wait(self) -> BatchResult:
        """Block until the batch has ended, release its memory, and return its results."""
        if not self._is_complete:
            self._end_event.synchronize()
        self._retained = None
        copy_in_s, kernel_s, copy_out_s = self.measure_stages()
        return BatchResult(
            self._results,
            self._kernel_bytes,
            self._packed_s + copy_in_s,
            kernel_s,
            copy_out_s,
            self._has_filled_buffers,
        )

    def measure_stages(self) -> StageSeconds:
        """Divide the batch's time on the device among copy-in, computation and copy-out, and recycle its events.

        Called once, after the batch has ended.

        The times of several parts overlap, and their sum is the total: copy-in is the time in which the
        next part is awaited and none is computed; copy-out is the time after the last part is computed.
        """
        began = self._begin_event
        total_s = began.elapsed_time(self._end_event) / 1000
        took = StageSeconds(0.0, total_s, 0.0)
        if self._part_events:
            copy_in_s = compute_s = before = 0.0
            for arrived, started, computed in self._part_events:
                arrived_s, computed_s = began.elapsed_time(arrived) / 1000, began.elapsed_time(computed) / 1000
                started_s = arrived_s if started is arrived else began.elapsed_time(started) / 1000
                copy_in_s += max(0.0, arrived_s - before)
                compute_s += computed_s - max(before, started_s)
                before = computed_s
            leaving_s = before if self._copy_out_event is None else began.elapsed_time(self._copy_out_event) / 1000
            took = StageSeconds(copy_in_s, compute_s, total_s - leaving_s)
        self._spare_events.extend(self._events)
        return took


def _poll_event(event: StreamEvent, seconds: float) -> bool:
    """Poll an event for at most `seconds`; return whether it has completed."""
    if event.query():
        return True
    give_up = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() >= give_up:
            return False
    return True


class StreamPipeline:
    """The streams for copy-in, computation and copy-out of one kind of batches, for example of the small ones."""

    def __init__(self, streams: StreamFactory, *, apart: bool = True) -> None:
        """Args: apart: each stage has a stream of its own; else all share one, which starts sooner."""
        self._factory = streams
        self._streams = [streams.make_stream() for _ in range(3)] if apart else [streams.make_stream()] * 3
        # Events of batches that are over; `PendingCudaLaunch.wait` adds them.
        self._spare_events: list[StreamEvent] = []
        self._last_copied_launch: Callable[[], PendingCudaLaunch | None] = lambda: None

    @property
    def is_copying(self) -> bool:
        """Whether a batch of `start_launches` is in flight: its caller has not waited for its end or dropped it."""
        # No earlier one ends later, as the streams are in order.
        last = self._last_copied_launch()
        return last is not None and not last.is_over

    @property
    def compute_stream(self) -> Any:
        """The compute stage's stream."""
        return self._streams[1]

    def start_launches(self, make_parts: Callable[[], Sequence[StagedLaunch]], held: object) -> PendingCudaLaunch:
        """Make the launches of a batch's parts, and enqueue copy-in, compute and copy-out of each, without
        blocking.

        While a part is copied in, the one before it is copied out.

        Args:
            make_parts: called once, with copy-in's stream as the thread's own.  The parts stay alive until
                the batch is over: a device's allocator knows one stream for each block of memory, so a
                block may be given back only when no stream uses it.
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
        pending = PendingCudaLaunch(
            began, marks, leaving, ended, held=(held, parts), events=events, spare=self._spare_events
        )
        self._last_copied_launch = weakref.ref(pending)
        return pending

    def enqueue_for_capture(self, parts: Sequence[StagedLaunch], replayed: Sequence[PartEvents]) -> None:
        """Enqueue copy-in, compute and copy-out of each part, so that a capture of the compute stream includes
        all of them.

        They run after all earlier work of the compute stream, and before all its later work.  The compute
        stream must be the thread's current one, and is so afterwards.

        Args: replayed: of each part; from `make_part_events`.
        """
        on_way_in, on_device, on_way_out = self._streams
        events: list[StreamEvent] = []
        begun = self._record_event(on_device, events)
        on_way_in.wait_event(begun)
        on_way_out.wait_event(begun)
        self._enqueue_stages(parts, events, replayed=replayed)
        on_device.wait_event(self._record_event(on_way_out, events))
        with self._factory.use(on_device):
            # A wait on a stream refers to the event as it was recorded before: the events can be recorded again.
            self._spare_events += events

    def start_single_step(
        self, stage: Callable[[], object], held: object, marks: Sequence[PartEvents] = ()
    ) -> PendingCudaLaunch:
        """Enqueue a batch as one step on the compute stream, such as a launch without copies or the replay of
        a graph.

        This takes half of the steps of `start_launches`.

        Args:
            held: stays alive until the batch is over.
            marks: the events that the stage records.
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

    def make_part_events(self, count: int) -> Sequence[PartEvents]:
        """Make events for `count` parts, which each replay of a graph records."""
        made = [(self._factory.make_graph_event(), self._factory.make_graph_event()) for _ in range(count)]
        return [PartEvents(arrived, arrived, computed) for arrived, computed in made]

    def run_on_compute_stream(self, work: Callable[[], object]) -> None:
        """Run a function with the compute stream as the thread's current one, outside any batch's measured time."""
        with self._factory.use(self._streams[1]):
            work()

    def _enqueue_stages(
        self,
        parts: Sequence[StagedLaunch],
        events: list[StreamEvent],
        *,
        are_measured_apart: bool = False,
        replayed: Sequence[PartEvents] = (),
    ) -> tuple[Sequence[PartEvents], StreamEvent | None]:
        """Enqueue copy-in, compute and copy-out of each part; return the events of all parts.

        Also return the event that marks the beginning of the last copy-out, or None unless
        `are_measured_apart`.

        Args:
            events: the list to which all recorded events are added.
            are_measured_apart: a stage's wait on its stream, behind other batches, is not counted as its
                time.
            replayed: recorded as well, for each part.
        """
        on_way_in, on_device, on_way_out = self._streams
        are_measured_apart = are_measured_apart and on_way_in is not on_device
        marks: list[PartEvents] = []
        leaving = None
        for number, part in enumerate(parts):
            with self._factory.use(on_way_in):
                part.copy_in()
                if replayed:
                    # Before the event that the next stage waits for: at the end of a capture, no work may be left
                    # for which no stream waits.
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
            marks.append(PartEvents(arrived, started, computed))
        return marks, leaving

    def _record_event(self, stream: DeviceStream, events: list[StreamEvent]) -> StreamEvent:
        """Record an event on a stream, and append it to `events`; a spare event is used if there is one."""
        event = self._spare_events.pop() if self._spare_events else self._factory.make_event()
        event.record(stream)
        events.append(event)
        return event

    def _synchronise_streams(self) -> None:
        """Wait for all streams after an error: their work may still write to memory that the caller is about
        to release.
        """
        for stream in self._streams:
            # The first error says more than the next one of the same device.
            with contextlib.suppress(Exception):
                stream.synchronize()
