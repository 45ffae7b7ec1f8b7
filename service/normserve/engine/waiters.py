"""The callers that wait for the results of jobs, and their deadlines.

Not thread-safe: it belongs to the event loop's thread.
"""

import asyncio
import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from normserve.errors import DeadlineExceededError, NormserveError
from normserve.jobs.job import Batch, BatchResult, NormJob, NormResult

OnEnd = Callable[[NormResult | NormserveError], None]
"""Told once what became of a job: its result, or why there is none.  It raises nothing."""


@dataclass(eq=False, slots=True)
class _PendingJob:
    """A job's way back, and what may end its wait."""

    on_end: OnEnd
    submitted_at: float
    start_deadline: float
    is_running: bool = False
    is_resolved: bool = False

    @property
    def can_expire(self) -> bool:
        """Whether its deadline still counts."""
        return not self.is_running and not self.is_resolved


class PendingJobs:
    """The jobs whose callers wait."""

    def __init__(self, on_late: Callable[[NormJob], None]) -> None:
        """Args: on_late: called with a job that has not run by its deadline, before its caller is told."""
        self._on_expired = on_late
        self._pending: dict[NormJob, _PendingJob] = {}
        # One timer for all: on a busy device most jobs wait for a moment, and hardly one until its deadline.
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry_at = math.inf

    def add(self, job: NormJob, deadline: float, on_end: OnEnd) -> None:
        """Have a caller wait for a job, until `deadline` by `time.perf_counter` if it does not run before.

        Raises:
            DeadlineExceededError: that has passed.
        """
        submitted = time.perf_counter()
        if deadline <= submitted:
            raise _make_deadline_error(job)
        self._pending[job] = _PendingJob(on_end, submitted, deadline)

    def remove(self, job: NormJob) -> bool:
        """The caller does not wait any more; whether the job had begun to run."""
        return self._pending.pop(job).is_running

    def is_pending(self, job: NormJob) -> bool:
        """Whether a caller still waits for its result."""
        waiting = self._pending.get(job)
        return waiting is not None and not waiting.is_resolved

    def is_running(self, job: NormJob) -> bool:
        """Whether a caller waits for a job that runs."""
        waiting = self._pending.get(job)
        return waiting is not None and waiting.is_running

    def enforce_deadline(self, job: NormJob) -> None:
        """Let the clock run for a job that does not run yet."""
        waiting = self._pending.get(job)
        # The caller of one that has run may no longer wait.
        if waiting is not None and not waiting.is_running:
            self._schedule_expiry(waiting.start_deadline)

    def record_start(self, batch: Batch) -> None:
        """These run now, and are late no more."""
        for job in batch.jobs:
            self._pending[job].is_running = True

    def resolve(self, batch: Batch, execution: BatchResult, started: float) -> None:
        """Tell everybody of a batch that began at `started`, by `time.perf_counter`, what came of it."""
        launch_bytes = sum(execution.kernel_bytes)
        for job, tensors, kernel_bytes in zip(batch.jobs, execution.results, execution.kernel_bytes, strict=True):
            waiting = self._pending.get(job)
            if waiting is None or waiting.is_resolved:
                continue
            waiting.is_resolved = True
            waiting.on_end(
                NormResult(
                    tensors,
                    max(0.0, started - waiting.submitted_at),
                    execution.copy_in_s,
                    execution.kernel_s,
                    execution.copy_out_s,
                    kernel_bytes,
                    launch_bytes,
                    len(batch.jobs),
                    started,
                )
            )

    def fail(self, jobs: Iterable[NormJob], error: NormserveError) -> None:
        """Tell those that still wait that it comes to nothing."""
        for job in jobs:
            waiting = self._pending.get(job)
            if waiting is not None and not waiting.is_resolved:
                waiting.is_resolved = True
                # Each its own: a traceback grows by the frames, and so by the tensors, of all who raise the error.
                waiting.on_end(copy.copy(error))

    def fail_all(self, error: NormserveError) -> None:
        """Tell everybody."""
        self.fail(tuple(self._pending), error)

    def _schedule_expiry(self, deadline: float) -> None:
        """Look for late jobs at a time by `time.perf_counter`, unless that is done before."""
        if deadline >= self._next_expiry_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        left = max(0.0, deadline - time.perf_counter())
        self._timer, self._next_expiry_at = (
            asyncio.get_running_loop().call_later(left, self._fail_expired),
            deadline,
        )

    def _fail_expired(self) -> None:
        """Refuse what is late; look again when the next one will be."""
        self._timer, self._next_expiry_at = None, math.inf
        now = time.perf_counter()
        may_be_late = [(job, waiting) for job, waiting in self._pending.items() if waiting.can_expire]
        for job, waiting in may_be_late:
            if waiting.start_deadline > now:
                self._schedule_expiry(waiting.start_deadline)
            else:
                self._on_expired(job)
                self.fail((job,), _make_deadline_error(job))


def _make_deadline_error(job: NormJob) -> DeadlineExceededError:
    return DeadlineExceededError(f"execution of this {job.spec.op.value} had not begun by its deadline")
