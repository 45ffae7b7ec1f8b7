"""The classes of jobs whose kernels are compiled, and the jobs that wait for a compilation.  A pure policy.

A class that was not compiled at start is compiled while other work continues: only its own jobs wait.  Clients
choose the classes, so their number and the rate of compilations are limited.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable

from normserve.errors import OverloadedError
from normserve.jobs.job import NormJob


class CompilationQueue:
    """The classes that are compiled, and the jobs of those that are not yet.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(
        self, *, max_classes: int, max_per_minute: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_classes = max_classes
        self._per_second = max_per_minute / 60
        self._burst = float(max_per_minute)
        self._clock = clock
        self._allowance = self._burst
        self._counted = clock()
        self._compiled: set[Hashable] = set()
        self._waiting: dict[Hashable, dict[NormJob, None]] = {}
        self._class_of: dict[NormJob, Hashable] = {}

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._class_of)

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._compiled

    def foresee(self, kinds: Iterable[Hashable]) -> None:
        """These are compiled already."""
        self._compiled.update(kinds)

    def wait_for(self, kind: Hashable, job: NormJob) -> bool:
        """Let a job wait for its class; whether the caller has to start its compilation.

        Raises:
            OverloadedError: as many classes are compiled as may be, or too many of late.
        """
        is_new = kind not in self._waiting
        if is_new:
            self._spend()
            self._waiting[kind] = {}
        self._waiting[kind][job] = None
        self._class_of[job] = kind
        return is_new

    def end(self, kind: Hashable, *, compiled: bool) -> Collection[NormJob]:
        """The compiler is done with a class; the jobs that waited for it and still do."""
        jobs = self._waiting.pop(kind)
        for job in jobs:
            del self._class_of[job]
        if compiled:
            self._compiled.add(kind)
        return jobs

    def discard(self, job: NormJob) -> None:
        """A job need not wait any more; unknown ones are fine."""
        if job in self._class_of:
            del self._waiting[self._class_of.pop(job)][job]

    def jobs(self) -> Iterable[NormJob]:
        """Everybody who waits."""
        return tuple(self._class_of)

    def _spend(self) -> None:
        if len(self._compiled) + len(self._waiting) >= self._max_classes:
            raise OverloadedError(
                f"kernels of {self._max_classes} classes are compiled, no more than that are kept", 60.0
            )
        now = self._clock()
        self._allowance = min(self._burst, self._allowance + (now - self._counted) * self._per_second)
        self._counted = now
        if self._allowance < 1:
            raise OverloadedError(
                "this needs kernels that are not compiled, and too many requests needed new kernels recently",
                (1 - self._allowance) / self._per_second,
            )
        self._allowance -= 1
