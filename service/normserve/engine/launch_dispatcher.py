"""The batches that the device has not finished.

A batch in flight is watched on the event loop, between its other callbacks: a thread that waits for it must be
woken, must take Python's lock, and must wake the loop in turn, which is several times what a small batch takes.
Only a batch that takes longer is left to such a thread.

Not thread-safe: it belongs to the event loop's thread.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from normserve.backends.interface import PendingLaunch
from normserve.engine.executor import Executor, Reply, WorkOutcome, make_loop_reply
from normserve.engine.progress import CompletionTracker
from normserve.jobs.job import Batch, QueueLane


class _PolledLaunch(NamedTuple):
    """A batch in flight, and the time by `time.perf_counter` until which the event loop polls it."""

    batch: Batch
    outcome: WorkOutcome
    poll_until: float


class LaunchDispatcher:
    """A dispatcher that launches batches, on this thread or by the executor, and polls those in flight.

    Attributes:
        progress: of all batches that did not end within `launch`.
    """

    def __init__(
        self, executor: Executor, on_end: Callable[[Batch, WorkOutcome], None], on_room: Callable[[], None]
    ) -> None:
        """Args:
        on_end: called with the outcome of a batch, unless `launch` returned it.
        on_room: called when another batch may be launched although none has ended.
        """
        self._executor = executor
        self._on_end, self._on_room = on_end, on_room
        # The batch that the executor's own thread has not launched yet.  The thread gets no other batch before
        # that: a queue there would keep all later batches from being launched on this thread, and two threads that
        # alternately launch and answer wait for Python's lock at every call that releases it.
        self._batch_to_launch: Batch | None = None
        self._polled: list[_PolledLaunch] = []
        self._is_poll_scheduled = False
        self._lane_counts = dict.fromkeys(QueueLane, 0)
        self._launch_count = 0
        self.progress = CompletionTracker()

    @property
    def is_launching(self) -> bool:
        """Whether a thread of the executor may be launching a batch now."""
        return self._batch_to_launch is not None

    def has_capacity(self, lane: QueueLane) -> bool:
        """Return whether the device would take another batch of that lane now."""
        if self._batch_to_launch is not None:
            return False
        depth = self._executor.backend.launch_depth
        return (
            self._launch_count < depth.max_launches and self._lane_counts[lane] < depth.max_launches_by_lane[lane]
        )

    def list_free_lanes(self) -> list[QueueLane]:
        """List the lanes of which the device would take another batch now."""
        return [lane for lane in QueueLane if self.has_capacity(lane)]

    def launch(self, batch: Batch) -> WorkOutcome | None:
        """Launch a batch, on this thread if that is faster than handing it to another.

        Return its outcome if it has ended; else None, and `on_end` is called with the outcome later.
        """
        executor = self._executor
        outcome: WorkOutcome | None = None
        # The executor's threads have no batch, so that none of them uses the device now.
        if not self._launch_count and executor.is_inline_size(batch):
            if batch.lane is QueueLane.LARGE and batch.nbytes <= executor.backend.max_inline_bytes:
                # Its copies can overlap with no other batch: one stream starts sooner than three.
                batch = Batch(batch.jobs, QueueLane.SMALL)
            outcome = executor.run_and_poll_inline(batch)
        elif executor.can_launch_inline(batch):
            # Another thread would launch the batch later, as both need Python's lock, and would delay this one.
            outcome = executor.launch_inline(batch)
        if outcome is None:
            self._batch_to_launch = batch
            executor.submit_batch(
                batch,
                make_loop_reply(functools.partial(self._record_launched, batch)),
                self._make_end_callback(batch),
            )
        elif isinstance(outcome.value, PendingLaunch):
            self._add_polled(_PolledLaunch(batch, outcome, time.perf_counter() + executor.poll_s))
        else:
            return outcome
        self._lane_counts[batch.lane] += 1
        self._launch_count += 1
        self.progress.begin_work()
        return None

    def _make_end_callback(self, batch: Batch) -> Reply:
        return make_loop_reply(functools.partial(self._end_launch, batch))

    def _add_polled(self, flight: _PolledLaunch) -> None:
        """Poll a batch in flight from the next iteration of the event loop on."""
        self._polled.append(flight)
        if not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            asyncio.get_running_loop().call_soon(self._poll_all)

    def _poll_all(self) -> None:
        """Poll the batches in flight, and end those that have completed.

        The others are polled again in the next iteration of the event loop, or, if they take long, left
        to a thread.
        """
        self._is_poll_scheduled = False
        watched, self._polled = self._polled, []
        for flight in watched:
            batch, outcome, until = flight
            landed = self._executor.poll_launch(outcome)
            if landed is not None:
                self._end_launch(batch, landed)
            elif time.perf_counter() < until:
                self._add_polled(flight)
            else:
                self._executor.submit_wait(outcome, batch.lane, self._make_end_callback(batch))

    def _record_launched(self, batch: Batch, _: WorkOutcome) -> None:
        self._clear_batch_to_launch(batch)
        self._on_room()

    def _clear_batch_to_launch(self, batch: Batch) -> None:
        if self._batch_to_launch is batch:
            self._batch_to_launch = None

    def _end_launch(self, batch: Batch, outcome: WorkOutcome) -> None:
        """Record that a batch is no longer in flight, and call `on_end` with its outcome."""
        self._clear_batch_to_launch(batch)
        self._lane_counts[batch.lane] -= 1
        self._launch_count -= 1
        self.progress.end_work()
        self._on_end(batch, outcome)


def describe_batch(batch: Batch) -> str:
    """Describe the jobs of a launch in a text for the crash report."""
    job = batch.jobs[0]
    tensors = {name: f"{tensor.dtype.label}{list(tensor.shape)}" for name, tensor in job.tensors.items()}
    return f"{len(batch.jobs)} requests of {job.spec}, the first with {tensors}"
