"""The batcher under any sequence of arrivals, departures and launches, beside a list that is searched anew."""

import weakref

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from normserve.engine.batcher import Batcher
from normserve.jobs.job import NormJob, QueueLane
from normserve.memory.tensors import DType, HostTensor

from tests.service.jobs.fake_jobs import job

MAX_REQUESTS, MAX_BYTES = 3, 2000
# Bytes of x by how it is to run: with others, alone though small, alone.
ROWS = st.sampled_from([1, 3, 30, 62, 63, 200])
LANES = st.sampled_from([tuple(QueueLane), (QueueLane.SMALL,), (QueueLane.LARGE,), ()])


class Batching(RuleBasedStateMachine):
    """Jobs of three classes, of sizes that share launches and of sizes that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(max_requests=MAX_REQUESTS, max_bytes=MAX_BYTES)
        self.waiting: list[NormJob] = []
        self.memory: list[weakref.ref] = []
        # Whether the device ever has room in one lane alone, which that lane owes to the other for as long.
        self.restricts = True
        # Bytes launched of each lane since both last had work, and of the largest launch of all.
        self.served = dict.fromkeys(QueueLane, 0)
        self.largest = 0

    @initialize(restricts=st.booleans())
    def begin(self, restricts):
        self.restricts = restricts

    def lane(self, each: NormJob) -> QueueLane:
        return QueueLane.SMALL if each.nbytes <= MAX_BYTES else QueueLane.LARGE

    @property
    def both_wait(self) -> bool:
        return {self.lane(each) for each in self.waiting} == set(QueueLane)

    @rule(sizes=st.lists(ROWS, min_size=1, max_size=6), eps=st.sampled_from([1e-5, 1e-6, 1e-7]))
    def add(self, sizes, eps):
        for rows in sizes:
            before = self.both_wait
            memory = np.zeros((rows, 8), np.float32)
            self.memory.append(weakref.ref(memory))
            x = HostTensor(DType.FLOAT32, memory.shape, memory.data.cast("B"))
            self.waiting.append(job(rows, 8, eps=eps, tensors={"x": x}))
            self.batcher.add(self.waiting[-1])
            if not before:
                self.served = dict.fromkeys(QueueLane, 0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        gone = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.batcher.discard(gone)
        self.batcher.discard(gone)
        assert gone not in self.batcher

    @rule(lanes=LANES)
    def take(self, lanes):
        waited = self.both_wait
        lanes = lanes if self.restricts else tuple(QueueLane)
        batch = self.batcher.take_batch(lanes)
        candidates = [each for each in self.waiting if self.lane(each) in lanes]
        if not candidates:
            assert batch is None
            return
        queue = [each for each in self.waiting if self.lane(each) is batch.lane]
        assert batch.lane in lanes
        assert list(batch.jobs) == self.expected(queue)
        for each in batch.jobs:
            self.waiting.remove(each)
        self.largest = max(self.largest, batch.nbytes)
        if waited and not self.restricts:
            self.served[batch.lane] += batch.nbytes
            # Start-time fair queueing: two lanes that both have work drift apart by a launch of each at most.
            assert abs(self.served[QueueLane.SMALL] - self.served[QueueLane.LARGE]) <= 2 * self.largest

    def expected(self, queue: list[NormJob]) -> list[NormJob]:
        """The oldest of a lane and, in order, those of its class that fit beside it."""
        head = queue[0]
        if head.nbytes > MAX_BYTES:
            return [head]
        members, nbytes = [], 0
        for each in queue:
            if each.spec == head.spec and each.nbytes <= MAX_BYTES:
                nbytes += each.nbytes
                if members and (len(members) == MAX_REQUESTS or nbytes > MAX_BYTES):
                    break
                members.append(each)
        return members

    @invariant()
    def what_waits_is_what_came_and_did_not_go(self):
        assert len(self.batcher) == len(self.waiting)
        assert bool(self.batcher) == bool(self.waiting)
        assert set(self.batcher) == set(self.waiting)
        assert all(each in self.batcher for each in self.waiting)

    @invariant()
    def what_went_is_not_kept(self):
        self.memory = [each for each in self.memory if each() is not None]
        assert len(self.memory) <= len(self.waiting)


Batching.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestBatching = Batching.TestCase
