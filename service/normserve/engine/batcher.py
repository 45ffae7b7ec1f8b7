"""The choice of the next batch.  A pure policy: no clock, no thread, no tensor.

Jobs of one class (see `NormJob.compute_batch_class`) become rows of one launch.  No job waits for others to arrive:
a batch consists of jobs that arrived while the device was busy, or in one turn of the event loop.  A free device
takes the oldest job of a lane together with the other jobs of its class.

Small and large jobs wait in separate lanes, which share the device by bytes (start-time fair queueing; Goyal, Vin,
Cheng, 1996): after one large job the small ones may use the same number of bytes.  A small job therefore waits for
at most one large job, however many are waiting, unless small jobs alone use half of the device.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator

from normserve.jobs.job import Batch, NormJob, QueueLane

# Limit of a small job.  Larger ones are copied to the device and back: several at once keep the bus busy in both
# directions.
_LARGE_BYTES = 256 * 2**10


class Batcher:
    """The waiting jobs, in two first-in, first-out queues, the lanes: one for small jobs, one for large jobs.

    The oldest job of a lane is taken together with others of its class, which may share a launch.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_small_bytes = min(max_bytes, _LARGE_BYTES)
        self._lanes = {lane: _LaneQueue() for lane in QueueLane}
        # Bytes, raised to the virtual time when a lane comes back from idling.
        self._served_bytes = dict.fromkeys(QueueLane, 0)
        self._virtual_time = 0
        self._job_count = 0

    def __len__(self) -> int:
        return self._job_count

    def __contains__(self, job: NormJob) -> bool:
        return any(job in queue for queue in self._lanes.values())

    def __iter__(self) -> Iterator[NormJob]:
        for queue in self._lanes.values():
            yield from queue

    def choose_lane(self, job: NormJob) -> QueueLane:
        """Choose the lane in which a job would wait."""
        return QueueLane.SMALL if job.nbytes <= self._max_small_bytes else QueueLane.LARGE

    def add(self, job: NormJob) -> None:
        """Add a job to the queue of its lane; a job larger than the limit of a batch will run alone."""
        lane = self.choose_lane(job)
        queue = self._lanes[lane]
        if not queue:
            self._served_bytes[lane] = max(self._served_bytes[lane], self._virtual_time)
        queue.add(job, job.compute_batch_class() if job.nbytes <= self._max_bytes else None)
        self._job_count += 1

    def discard(self, job: NormJob) -> None:
        """Remove a job from its queue, if it is in one."""
        for queue in self._lanes.values():
            if job in queue:
                queue.remove(job)
                self._job_count -= 1

    def take_batch(self, lanes: Collection[QueueLane] = tuple(QueueLane)) -> Batch | None:
        """Remove and return the next batch: the oldest job of a lane, with others that may share its launch.

        Of several lanes with jobs, the one with the smallest count of bytes is chosen.  A lane's count is of the
        batches that were taken from it here.  When an empty lane gets a job, its count is raised to the virtual
        time, which is the count that the last chosen lane had before its batch.

        Args:
            lanes: those in which the device has capacity.

        Returns: None if no job waits in these lanes.
        """
        waiting = [lane for lane in QueueLane if lane in lanes and self._lanes[lane]]
        if not waiting:
            return None
        lane = min(waiting, key=self._served_bytes.__getitem__)
        queue = self._lanes[lane]
        batch = Batch(tuple(self._limit_batch(queue.list_next_jobs())), lane)
        for job in batch.jobs:
            queue.remove(job)
        self._job_count -= len(batch.jobs)
        self._virtual_time = self._served_bytes[lane]
        self._served_bytes[lane] += batch.nbytes
        return batch

    def _limit_batch(self, members: Iterable[NormJob]) -> Iterator[NormJob]:
        """Yield the first of these jobs: at least one, and then as many as the limits of one launch allow."""
        nbytes = 0
        for count, job in enumerate(members):
            nbytes += job.nbytes
            if count and (count >= self._max_requests or nbytes > self._max_bytes):
                return
            yield job


class _LaneQueue:
    """The waiting jobs of a lane in order of arrival.  They are also indexed by batch class; jobs of one class may
    share a launch.
    """

    def __init__(self) -> None:
        self._batch_classes: dict[NormJob, Hashable] = {}
        self._jobs_by_class: dict[Hashable, dict[NormJob, None]] = {}

    def __len__(self) -> int:
        return len(self._batch_classes)

    def __contains__(self, job: NormJob) -> bool:
        return job in self._batch_classes

    def __iter__(self) -> Iterator[NormJob]:
        return iter(self._batch_classes)

    def add(self, job: NormJob, batch_class: Hashable | None) -> None:
        key = job if batch_class is None else batch_class
        self._batch_classes[job] = key
        self._jobs_by_class.setdefault(key, {})[job] = None

    def remove(self, job: NormJob) -> None:
        """Remove a job, which must be in the queue."""
        key = self._batch_classes.pop(job)
        members = self._jobs_by_class[key]
        del members[job]
        if not members:
            del self._jobs_by_class[key]

    def list_next_jobs(self) -> Iterable[NormJob]:
        """List the oldest job and all jobs that may share its launch, oldest first."""
        return self._jobs_by_class[self._batch_classes[next(iter(self._batch_classes))]]
