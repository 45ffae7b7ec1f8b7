"""Which waiting jobs run next, and together.  Pure policy: no clock, no thread, no tensor.

Jobs of one class (see `NormJob.batch_class`) become rows of one launch.  Nothing ever waits for company: what
gathers is what arrived while the device was busy, and a free device takes the oldest job with its kin.
"""

from collections.abc import Hashable, Iterable, Iterator

from normserve.jobs import Batch, NormJob


class Batcher:
    """A first-come-first-served queue whose head takes its kin along."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._classes: dict[NormJob, Hashable] = {}  # in order of arrival
        self._members: dict[Hashable, dict[NormJob, None]] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, job: NormJob) -> bool:
        return job in self._classes

    def __iter__(self) -> Iterator[NormJob]:
        return iter(self._classes)

    def add(self, job: NormJob) -> None:
        """Queue a job."""
        key = job.batch_class()
        if key is None or job.nbytes > self._max_bytes:
            key = job
        self._classes[job] = key
        self._members.setdefault(key, {})[job] = None

    def discard(self, job: NormJob) -> None:
        """Forget a job that need not run any more; unknown ones are fine."""
        if job not in self._classes:
            return
        key = self._classes.pop(job)
        members = self._members[key]
        del members[job]
        if not members:
            del self._members[key]

    def due(self, room: int) -> list[Batch]:
        """Take out the batches for a device that can accept `room` of them now, oldest first."""
        batches: list[Batch] = []
        while self._classes and len(batches) < room:
            oldest = next(iter(self._classes))
            jobs = tuple(self._fitting(self._members[self._classes[oldest]]))
            for job in jobs:
                self.discard(job)
            batches.append(Batch(jobs))
        return batches

    def _fitting(self, members: Iterable[NormJob]) -> Iterator[NormJob]:
        """The first members, as many as one launch takes, at least one."""
        nbytes = 0
        for count, job in enumerate(members):
            nbytes += job.nbytes
            if count and (count >= self._max_requests or nbytes > self._max_bytes):
                return
            yield job
