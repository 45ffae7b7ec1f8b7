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
"""A callback that is called once, with a job's result or the error that replaces it.  It raises nothing."""


@dataclass(eq=False, slots=True)
class _PendingJob:
    """The callback and the deadline of a job whose caller waits.

    Attributes:
        submitted_at, start_deadline: by `time.perf_counter`; the job must begin to run by the deadline.
        is_resolved: whether the callback has been called.
    """

    on_end: OnEnd
    submitted_at: float
    start_deadline: float
    is_running: bool = False
    is_resolved: bool = False

    @property
    def can_expire(self) -> bool:
        """Whether its deadline still applies."""
        return not self.is_running and not self.is_resolved


class PendingJobs:
    """The submitted jobs whose callers still wait, and the deadlines by which these jobs must begin to run."""

    def __init__(self, on_late: Callable[[NormJob], None]) -> None:
        """Args: on_late: called with a job that has not begun to run by its deadline, before its caller gets the
        error.
        """
        self._on_expired = on_late
        self._pending: dict[NormJob, _PendingJob] = {}
        # One timer for all: on a busy device most jobs wait for a moment, and hardly one until its deadline.
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry_at = math.inf

    def add(self, job: NormJob, start_deadline: float, on_end: OnEnd) -> None:
        """Add a job, which must begin to run by `start_deadline` (`time.perf_counter`).

        Raises:
            DeadlineExceededError: that has passed.
        """
        submitted = time.perf_counter()
        if start_deadline <= submitted:
            raise _make_deadline_error(job)
        self._pending[job] = _PendingJob(on_end, submitted, start_deadline)

    def remove(self, job: NormJob) -> bool:
        """Forget a job whose caller does not wait any more; return whether the job had begun to run."""
        return self._pending.pop(job).is_running

    def is_pending(self, job: NormJob) -> bool:
        """Return whether a caller still waits for the job's result."""
        waiting = self._pending.get(job)
        return waiting is not None and not waiting.is_resolved

    def is_running(self, job: NormJob) -> bool:
        """Return whether a job that a caller has not removed has begun to run."""
        waiting = self._pending.get(job)
        return waiting is not None and waiting.is_running

    def begin_deadline_timer(self, job: NormJob) -> None:
        """Start the timer for the deadline of a job that does not run yet."""
        waiting = self._pending.get(job)
        # The caller of one that has run may no longer wait.
        if waiting is not None and not waiting.is_running:
            self._schedule_expiry(waiting.start_deadline)

    def record_start(self, batch: Batch) -> None:
        """Record that a batch's jobs run; their deadlines no longer apply."""
        for job in batch.jobs:
            self._pending[job].is_running = True

    def resolve(self, batch: Batch, execution: BatchResult, started: float) -> None:
        """Call the callbacks of a batch's jobs with their results, except for callers that no longer wait.

        Args: started: when the batch began, by `time.perf_counter`.
        """
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
        """Call the callbacks of these jobs with the error, except for callers that no longer wait."""
        for job in jobs:
            waiting = self._pending.get(job)
            if waiting is not None and not waiting.is_resolved:
                waiting.is_resolved = True
                # Each its own: a traceback grows by the frames, and so by the tensors, of all who raise the error.
                waiting.on_end(copy.copy(error))

    def fail_all(self, error: NormserveError) -> None:
        """Give the error to all callers that still wait."""
        self.fail(tuple(self._pending), error)

    def _schedule_expiry(self, deadline: float) -> None:
        """Set the timer to a deadline (`time.perf_counter`), unless it is already set to an earlier one."""
        if deadline >= self._next_expiry_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        remaining_s = max(0.0, deadline - time.perf_counter())
        self._timer, self._next_expiry_at = (
            asyncio.get_running_loop().call_later(remaining_s, self._fail_expired),
            deadline,
        )

    def _fail_expired(self) -> None:
        """Fail the jobs that have not begun to run by their deadlines, and set the timer to the next deadline."""
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
