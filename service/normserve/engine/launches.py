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

from normserve.backends.base import PendingLaunch
from normserve.engine.executor import Executor, Reply, WorkOutcome, wrap_for_loop
from normserve.engine.progress import CompletionTracker
from normserve.jobs.job import Batch, QueueLane


class _PolledLaunch(NamedTuple):
    """A batch in flight, and until when the event loop watches it, by `time.perf_counter`."""

    batch: Batch
    outcome: WorkOutcome
    until: float


class LaunchDispatcher:
    """Gives batches to an executor and counts those that it has.

    Attributes:
        progress: of those that its threads run and have run.
    """

    def __init__(
        self, executor: Executor, on_end: Callable[[Batch, WorkOutcome], None], on_room: Callable[[], None]
    ) -> None:
        """Args:
        on_end: is told what became of a batch that `run` did not wait for.
        on_room: called when another batch may be launched although none has ended.
        """
        self._executor = executor
        self._on_end, self._on_room = on_end, on_room
        # What the executor's own thread has not launched yet.  It gets no other batch before that: a queue there
        # would keep all later batches from being launched on this thread, and two threads that launch and answer
        # by turns wait for Python's lock at every call that releases it.
        self._handed_over: Batch | None = None
        self._watched: list[_PolledLaunch] = []
        self._is_to_look = False
        self._running = dict.fromkeys(QueueLane, 0)
        self._launched = 0
        self.progress = CompletionTracker()

    @property
    def is_launching(self) -> bool:
        """Whether a thread of the executor may be launching a batch now."""
        return self._handed_over is not None

    def has_room(self, lane: QueueLane) -> bool:
        """Whether the device would take another batch of that lane now."""
        if self._handed_over is not None:
            return False
        depth = self._executor.backend.depth
        return self._launched < depth.total and self._running[lane] < depth.lanes[lane]

    def free_lanes(self) -> list[QueueLane]:
        """Of which lanes the device would take another batch now."""
        return [lane for lane in QueueLane if self.has_room(lane)]

    def run(self, batch: Batch) -> WorkOutcome | None:
        """Run a batch; what became of it, or None where `on_end` will be told."""
        executor = self._executor
        outcome: WorkOutcome | None = None
        # Nothing is with the executor's threads, so that none of them uses the device meanwhile.
        if not self._launched and executor.runs_soon(batch):
            if batch.lane is QueueLane.LARGE and batch.nbytes <= executor.backend.inline_bytes:
                # Nothing is there that its copies could overlap with: one stream starts sooner than three.
                batch = Batch(batch.jobs, QueueLane.SMALL)
            outcome = executor.run_here(batch)
        elif executor.launches_here(batch):
            # Threads that take turns with Python's lock would set it going later, and hold up this one meanwhile.
            outcome = executor.launch_here(batch)
        if outcome is None:
            self._handed_over = batch
            executor.run(batch, wrap_for_loop(functools.partial(self._note_launched, batch)), self._reply(batch))
        elif isinstance(outcome.value, PendingLaunch):
            self._watch(_PolledLaunch(batch, outcome, time.perf_counter() + executor.watched_s))
        else:
            return outcome
        self._running[batch.lane] += 1
        self._launched += 1
        self.progress.begin()
        return None

    def _reply(self, batch: Batch) -> Reply:
        return wrap_for_loop(functools.partial(self._end, batch))

    def _watch(self, flight: _PolledLaunch) -> None:
        self._watched.append(flight)
        if not self._is_to_look:
            self._is_to_look = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Conclude what has landed; what has not is looked at in the next turn of the loop, or left to a thread."""
        self._is_to_look = False
        watched, self._watched = self._watched, []
        for flight in watched:
            batch, outcome, until = flight
            landed = self._executor.landed(outcome)
            if landed is not None:
                self._end(batch, landed)
            elif time.perf_counter() < until:
                self._watch(flight)
            else:
                self._executor.await_landing(outcome, batch.lane, self._reply(batch))

    def _note_launched(self, batch: Batch, _: WorkOutcome) -> None:
        self._forget_handed_over(batch)
        self._on_room()

    def _forget_handed_over(self, batch: Batch) -> None:
        if self._handed_over is batch:
            self._handed_over = None

    def _end(self, batch: Batch, outcome: WorkOutcome) -> None:
        self._forget_handed_over(batch)
        self._running[batch.lane] -= 1
        self._launched -= 1
        self.progress.end()
        self._on_end(batch, outcome)


def describe_batch(batch: Batch) -> str:
    """What a launch was to compute, for people."""
    job = batch.jobs[0]
    tensors = {name: f"{tensor.dtype.label}{list(tensor.shape)}" for name, tensor in job.tensors.items()}
    return f"{len(batch.jobs)} requests of {job.spec}, the first with {tensors}"
