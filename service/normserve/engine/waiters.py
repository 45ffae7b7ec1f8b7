"""The callers that wait for the results of jobs, and their deadlines.

Not thread-safe: it belongs to the event loop's thread.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from normserve.errors import DeadlineExceededError, NormserveError
from normserve.jobs.job import Batch, Execution, NormJob, NormResult

OnEnd = Callable[[NormResult | NormserveError], None]
"""Told once what became of a job: its result, or why there is none.  It raises nothing."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A job's way back, and what may end its wait."""

    on_end: OnEnd
    submitted: float
    deadline: float
    timer: asyncio.TimerHandle | None = None
    is_running: bool = False
    is_told: bool = False


class Replies:
    """The jobs whose callers wait."""

    def __init__(self, on_late: Callable[[NormJob], None]) -> None:
        """Args: on_late: called with a job that has not run by its deadline, before its caller is told."""
        self._on_late = on_late
        self._waiting: dict[NormJob, _Waiting] = {}

    def expect(self, job: NormJob, deadline: float, on_end: OnEnd) -> None:
        """Have a caller wait for a job, until `deadline` by `time.perf_counter` if it does not run before.

        Raises:
            DeadlineExceededError: that has passed.
        """
        submitted = time.perf_counter()
        if deadline <= submitted:
            raise _late(job)
        self._waiting[job] = _Waiting(on_end, submitted, deadline)

    def forget(self, job: NormJob) -> bool:
        """The caller does not wait any more; whether the job had begun to run."""
        waiting = self._waiting.pop(job)
        if waiting.timer is not None:
            waiting.timer.cancel()
        return waiting.is_running

    def is_awaited(self, job: NormJob) -> bool:
        """Whether a caller still waits for its result."""
        waiting = self._waiting.get(job)
        return waiting is not None and not waiting.is_told

    def has_begun(self, job: NormJob) -> bool:
        """Whether a caller waits for a job that runs."""
        waiting = self._waiting.get(job)
        return waiting is not None and waiting.is_running

    def keep_deadline(self, job: NormJob) -> None:
        """Let the clock run for a job that does not run yet."""
        waiting = self._waiting.get(job)
        # The caller of one that has run may no longer wait.
        if waiting is not None and not waiting.is_running:
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
            if waiting is None or waiting.is_told:
                continue
            waiting.is_told = True
            waiting.on_end(
                NormResult(
                    tensors,
                    max(0.0, started - waiting.submitted),
                    execution.copy_in_s,
                    execution.kernel_s,
                    execution.copy_out_s,
                    kernel_bytes,
                    launch_bytes,
                    len(batch.jobs),
                    started,
                )
            )

    def refuse(self, jobs: Iterable[NormJob], error: NormserveError) -> None:
        """Tell those that still wait that it comes to nothing."""
        for job in jobs:
            waiting = self._waiting.get(job)
            if waiting is not None and not waiting.is_told:
                waiting.is_told = True
                # Each its own: a traceback grows by the frames, and so by the tensors, of all who raise the error.
                waiting.on_end(copy.copy(error))

    def refuse_all(self, error: NormserveError) -> None:
        """Tell everybody."""
        self.refuse(tuple(self._waiting), error)

    def _expire(self, job: NormJob) -> None:
        self._on_late(job)
        self.refuse((job,), _late(job))


def settling(future: asyncio.Future[NormResult]) -> OnEnd:
    """A callback that settles a future, unless it is done or cancelled."""

    def settle(ended: NormResult | NormserveError) -> None:
        if future.done():
            return
        if isinstance(ended, NormserveError):
            future.set_exception(ended)
        else:
            future.set_result(ended)

    return settle


def _late(job: NormJob) -> DeadlineExceededError:
    return DeadlineExceededError(f"execution of this {job.spec.op.value} had not begun by its deadline")
