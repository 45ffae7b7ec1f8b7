"""Batches that have been put on streams and have not ended, and the durations of their stages."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from normserve.backends.interface import PendingLaunch
from normserve.jobs.job import BatchResult
from normserve.memory.tensors import HostTensor


class StreamEvent(Protocol):
    """An event on a stream, as CUDA defines it.

    Attributes:
        cuda_event: the driver's handle, once the event has been recorded.
    """

    @property
    def cuda_event(self) -> int: ...

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class StageEvents(NamedTuple):
    """The events of one part of a batch that is copied.

    Attributes:
        arrived: the end of its copy-in.
        started: the beginning of its computation; `arrived` where nothing else can delay it.
        computed: the end of its computation.
    """

    arrived: StreamEvent
    started: StreamEvent
    computed: StreamEvent


class StageSeconds(NamedTuple):
    """The duration of each stage on the device, without its wait for the stage before."""

    copy_in: float
    compute: float
    copy_out: float


class PendingCudaLaunch(PendingLaunch):
    """A batch on the device, which has ended once its last event has."""

    __slots__ = (
        "_begin_event",
        "_copy_out_event",
        "_end_event",
        "_events",
        "_has_filled_buffers",
        "_is_complete",
        "_kernel_bytes",
        "_packed_s",
        "_results",
        "_retained",
        "_spare_events",
        "_stage_events",
    )

    def __init__(
        self,
        began: StreamEvent,
        parts: Sequence[StageEvents],
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
        self._begin_event, self._stage_events, self._copy_out_event, self._end_event = began, parts, leaving, ended
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
        """Set the fields of the `BatchResult`, while the device computes them.

        Args: packed_s: the time that it took to pack its tensors.
        """
        self._results, self._kernel_bytes = outputs, kernel_bytes
        self._packed_s, self._has_filled_buffers = packed_s, are_placed

    def poll(self, seconds: float) -> bool:
        self._is_complete = _poll_event(self._end_event, seconds)
        return self._is_complete

    def wait(self) -> BatchResult:
        """Block until the batch has ended, and release its memory."""
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
        """Divide the time on the device among the stages, and recycle the events; called once, after the end.

        The times of several parts overlap, and their sum is the total: copy-in is the time in which the next part
        is awaited and none is computed; copy-out is the time after the last part is computed.
        """
        began = self._begin_event
        total_s = began.elapsed_time(self._end_event) / 1000
        took = StageSeconds(0.0, total_s, 0.0)
        if self._stage_events:
            copy_in_s = compute_s = before = 0.0
            for arrived, started, computed in self._stage_events:
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
    """Poll an event for at most `seconds`; return whether it has ended."""
    if event.query():
        return True
    give_up = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() >= give_up:
            return False
    return True
