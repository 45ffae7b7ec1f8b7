"""Who waits for the result of a job, until when, and what each is told.

Not thread-safe: it belongs to the event loop's thread.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from normserve.errors import DeadlineExceededError, NormserveError
from normserve.jobs.job import Batch, Execution, NormJob, NormResult


@dataclass(eq=False, slots=True)
class _Waiting:
    """A job's way back, and what may end its wait."""

    future: asyncio.Future[NormResult]
    submitted: float
    deadline: float
    timer: asyncio.TimerHandle | None = None
    is_running: bool = False


class Replies:
    """The jobs whose callers wait."""

    def __init__(self, on_late: Callable[[NormJob], None]) -> None:
        """Args: on_late: called with a job that has not run by its deadline, before its caller hears of it."""
        self._on_late = on_late
        self._waiting: dict[NormJob, _Waiting] = {}

    def expect(self, job: NormJob, deadline: float) -> asyncio.Future[NormResult]:
        """Have a caller wait for a job, until `deadline` by `time.perf_counter` if it does not run before.

        Raises:
            DeadlineExceededError: that has passed.
        """
        submitted = time.perf_counter()
        if deadline <= submitted:
            raise _late(job)
        future: asyncio.Future[NormResult] = asyncio.get_running_loop().create_future()
        self._waiting[job] = _Waiting(future, submitted, deadline)
        return future

    def forget(self, job: NormJob) -> bool:
        """The caller does not wait any more; whether the job had begun to run."""
        waiting = self._waiting.pop(job)
        if waiting.timer is not None:
            waiting.timer.cancel()
        return waiting.is_running

    def is_awaited(self, job: NormJob) -> bool:
        """Whether anybody still waits for its result."""
        waiting = self._waiting.get(job)
        return waiting is not None and not waiting.future.done()

    def has_begun(self, job: NormJob) -> bool:
        """Whether somebody waits for a job that runs."""
        waiting = self._waiting.get(job)
        return waiting is not None and waiting.is_running

    def keep_deadline(self, job: NormJob) -> None:
        """Let the clock run for a job that does not run yet."""
        waiting = self._waiting[job]
        if not waiting.is_running:
            left = max(0.0, waiting.deadline - time.perf_counter())
            waiting.timer = asyncio.get_running_loop().call_later(left, self._expire, job)

    def note_start(self, batch: Batch) -> None:
        """These run now, and are late no more."""
        for job in batch.jobs:
            waiting = self._waiting[job]
            waiting.is_running = True
            if waiting.timer is not None:
                waiting.timer.cancel()

    def give(self, batch: Batch, execution: Execution, started: float) -> None:
        """Tell everybody of a batch that began at `started`, by `time.perf_counter`, what came of it."""
        launch_bytes = sum(execution.kernel_bytes)
        for job, tensors, kernel_bytes in zip(batch.jobs, execution.outputs, execution.kernel_bytes, strict=True):
            waiting = self._waiting.get(job)
            if waiting is None or waiting.future.done():
                continue
            waiting.future.set_result(
                NormResult(
                    tensors=tensors,
                    queue_s=max(0.0, started - waiting.submitted),
                    copy_in_s=execution.copy_in_s,
                    kernel_s=execution.kernel_s,
                    copy_out_s=execution.copy_out_s,
                    kernel_bytes=kernel_bytes,
                    launch_bytes=launch_bytes,
                    batch_size=len(batch.jobs),
                )
            )

    def refuse(self, jobs: Iterable[NormJob], error: NormserveError) -> None:
        """Tell those that still wait that it comes to nothing."""
        for job in jobs:
            waiting = self._waiting.get(job)
            if waiting is not None and not waiting.future.done():
                # Each its own: a traceback grows by the frames, and so by the tensors, of all who raise the error.
                waiting.future.set_exception(copy.copy(error))

    def refuse_all(self, error: NormserveError) -> None:
        """Tell everybody."""
        self.refuse(tuple(self._waiting), error)

    def _expire(self, job: NormJob) -> None:
        self._on_late(job)
        self.refuse((job,), _late(job))


def _late(job: NormJob) -> DeadlineExceededError:
    return DeadlineExceededError(f"execution of this {job.spec.op.value} had not begun by its deadline")
