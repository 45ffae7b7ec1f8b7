"""The classes of jobs whose kernels are compiled, and the jobs that wait for a compilation.  A pure policy.

A class that was not compiled at start is compiled while other work continues: only its own jobs wait.  Clients
choose the classes, so their number and the rate of compilations are limited.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable

from normserve.errors import OverloadedError
from normserve.jobs.job import NormJob


class CompilationQueue:
    """The job classes whose kernels are compiled, and the waiting jobs of other classes, whose kernels are being
    compiled.

    Jobs of one class need the same kernels.  Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(
        self, *, max_classes: int, max_per_minute: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_classes = max_classes
        self._tokens_per_s = max_per_minute / 60
        self._capacity = float(max_per_minute)
        self._clock = clock
        self._tokens = self._capacity
        self._refilled_at = clock()
        self._compiled_classes: set[Hashable] = set()
        self._waiting_jobs: dict[Hashable, dict[NormJob, None]] = {}
        self._waiting_classes: dict[NormJob, Hashable] = {}

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._waiting_classes)

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._compiled_classes

    def add_compiled(self, kinds: Iterable[Hashable]) -> None:
        """Add classes that are already compiled."""
        self._compiled_classes.update(kinds)

    def add_waiting_job(self, kernel_class: Hashable, job: NormJob) -> bool:
        """Add a job that waits for the kernels of its class.  Return whether it is the first of its class; then the
        caller must start the compilation.

        Raises:
            OverloadedError: the limit of compiled classes is reached, or the rate of compilations is too high.
        """
        is_new = kernel_class not in self._waiting_jobs
        if is_new:
            self._reserve_compilation()
            self._waiting_jobs[kernel_class] = {}
        self._waiting_jobs[kernel_class][job] = None
        self._waiting_classes[job] = kernel_class
        return is_new

    def end_compilation_and_take_jobs(self, kernel_class: Hashable, *, has_succeeded: bool) -> Collection[NormJob]:
        """Record that the compilation of a class has ended; remove and return the jobs that waited for it.

        Args: has_succeeded: whether it succeeded, so that later jobs of the class need not wait.
        """
        jobs = self._waiting_jobs.pop(kernel_class)
        for job in jobs:
            del self._waiting_classes[job]
        if has_succeeded:
            self._compiled_classes.add(kernel_class)
        return jobs

    def discard_job(self, job: NormJob) -> None:
        """Remove a job, if it waits."""
        if job in self._waiting_classes:
            del self._waiting_jobs[self._waiting_classes.pop(job)][job]

    def list_jobs(self) -> Iterable[NormJob]:
        """List all waiting jobs."""
        return tuple(self._waiting_classes)

    def _reserve_compilation(self) -> None:
        """Count a new compilation against two limits: on the number of classes, and on the compilations per minute.

        Raises:
            OverloadedError: a limit is reached.
        """
        if len(self._compiled_classes) + len(self._waiting_jobs) >= self._max_classes:
            raise OverloadedError(
                f"kernels of {self._max_classes} classes are compiled, no more than that are kept", 60.0
            )
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._refilled_at) * self._tokens_per_s)
        self._refilled_at = now
        if self._tokens < 1:
            raise OverloadedError(
                "this needs kernels that are not compiled, and too many requests needed new kernels recently",
                (1 - self._tokens) / self._tokens_per_s,
            )
        self._tokens -= 1
