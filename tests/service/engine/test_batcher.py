"""Which jobs share a launch, and in which order they run."""

import pytest
from normserve.engine.batcher import Batcher
from normserve.jobs.job import Op, PassDirection, QueueLane
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import job, layer, tensor


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(max_requests=3, max_bytes=1000)


def drained(batcher: Batcher) -> list[list]:
    batches = []
    while (batch := batcher.take_batch()) is not None:
        batches.append(list(batch.jobs))
    return batches


def test_empty_queue_has_nothing_due(batcher):
    assert batcher.take_batch() is None


def test_nothing_is_due_without_a_free_lane(batcher):
    batcher.add(job(1, 4))
    assert batcher.take_batch(()) is None
    assert batcher.take_batch((QueueLane.LARGE,)) is None
    assert len(batcher) == 1


def test_kin_share_a_launch_whatever_their_rows(batcher):
    jobs = [job(1, 4), job(2, 3, 4), job(4)]
    for each in jobs:
        batcher.add(each)
    assert drained(batcher) == [jobs]
    assert len(batcher) == 0


def test_oldest_goes_first_and_takes_its_kin_along(batcher):
    a, b, a2, b2 = job(1, 4), job(1, 8), job(2, 4), job(2, 8)
    for each in (a, b, a2, b2):
        batcher.add(each)
    assert drained(batcher) == [[a, a2], [b, b2]]


def test_launch_is_bounded_in_requests(batcher):
    jobs = [job(1, 4) for _ in range(5)]
    for each in jobs:
        batcher.add(each)
    assert drained(batcher) == [jobs[:3], jobs[3:]]


def test_launch_is_bounded_in_bytes(batcher):
    jobs = [job(25, 4) for _ in range(3)]
    for each in jobs:
        batcher.add(each)
    assert drained(batcher) == [jobs[:2], jobs[2:]]


def test_large_job_runs_alone(batcher):
    large = [job(100, 4) for _ in range(2)]
    for each in large:
        batcher.add(each)
    assert drained(batcher) == [[each] for each in large]


class TestLanes:
    def test_small_job_waits_for_one_large_job_at_most(self, batcher):
        large = [job(100, 4) for _ in range(3)]
        for each in large:
            batcher.add(each)
        assert batcher.take_batch().jobs == (large[0],)
        small = job(1, 4)
        batcher.add(small)
        assert drained(batcher) == [[small], [large[1]], [large[2]]]

    def test_large_job_waits_for_its_own_bytes_of_small_work_at_most(self, batcher):
        first, second = job(100, 4), job(100, 4)
        batcher.add(first)
        batcher.add(second)
        assert batcher.take_batch().jobs == (first,)
        # Strangers, so that each is a launch of its own.
        small = [job(10, 4, eps=number) for number in range(1, 21)]
        for each in small:
            batcher.add(each)
        order = drained(batcher)
        # One more, for the small ones win a tie.
        assert order.index([second]) == first.nbytes // small[0].nbytes + 1

    def test_idle_lane_saves_up_no_turns(self, batcher):
        for _ in range(5):
            batcher.add(job(100, 4))
        while batcher.take_batch() is not None:
            pass
        small = [job(50, 4, eps=number) for number in range(1, 6)]
        large = [job(100, 4), job(100, 4)]
        for each in (*small, *large):
            batcher.add(each)
        order = drained(batcher)
        assert order.index([large[0]]) < order.index([small[4]])

    def test_lane_that_was_not_free_is_owed_what_the_other_took_meanwhile(self, batcher):
        small = [job(50, 4, eps=number) for number in range(1, 9)]
        large = [job(100, 4) for _ in range(4)]
        for each in (small[0], *large):
            batcher.add(each)
        for taken in large[:3]:
            assert batcher.take_batch((QueueLane.LARGE,)).jobs == (taken,)
        for each in small[1:]:
            batcher.add(each)
        order = drained(batcher)
        # Three large launches of 1600 bytes are six small ones of 800; they win the tie.
        assert order.index([large[3]]) == 7

    def test_a_quarter_of_a_mebibyte_is_the_last_that_is_small(self):
        batcher = Batcher(max_requests=3, max_bytes=2**22)
        assert batcher.choose_lane(job(2**16, 1)) is QueueLane.SMALL
        assert batcher.choose_lane(job(2**16 + 1, 1)) is QueueLane.LARGE

    def test_batch_says_its_lane(self, batcher):
        batcher.add(job(100, 4))
        assert batcher.take_batch((QueueLane.LARGE,)).lane is QueueLane.LARGE
        batcher.add(job(1, 4))
        assert batcher.take_batch((QueueLane.SMALL,)).lane is QueueLane.SMALL

    def test_every_lane_is_looked_through(self, batcher):
        pair = [job(1, 4), job(100, 4)]
        for each in pair:
            batcher.add(each)
        assert list(batcher) == pair
        assert all(each in batcher for each in pair)


def test_discarded_job_is_gone_and_its_kin_stay(batcher):
    first, second = job(1, 4), job(1, 4)
    batcher.add(first)
    batcher.add(second)
    batcher.discard(first)
    batcher.discard(first)
    assert first not in batcher
    assert drained(batcher) == [[second]]


LAYER = layer()
WEIGHT = {"weight": tensor(4)}
STRANGERS = {
    "size": (job(1, 4), job(1, 5)),
    "dtype": (job(1, 4), job(1, 4, tensors={"x": tensor(1, 4, dtype=DType.FLOAT16)})),
    "eps": (job(1, 4), job(1, 4, eps=1e-6)),
    "activation": (job(1, 4), job(1, 4, activation="silu")),
    "out_dtype": (job(1, 4), job(1, 4, out_dtype=DType.FLOAT16)),
    "stats": (job(1, 4), job(1, 4, stats=True)),
    "op": (job(1, 4), job(1, 4, op=Op.RMS_NORM)),
    "residual": (job(1, 4), job(1, 4, tensors={"residual": tensor(1, 4)})),
    "weight": (job(1, 4), job(1, 4, tensors=WEIGHT)),
    "layer": (job(1, 4, layer=LAYER), job(1, 4, layer=layer())),
    "dropout": (job(1, 4, dropout=0.5, seed=1), job(1, 4, dropout=0.5, seed=1)),
    "parameter gradients": (
        job(1, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(1, 4)} | WEIGHT),
        job(1, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(1, 4)} | WEIGHT),
    ),
    "scale": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2),
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"scale": tensor(1, 4)}),
    ),
    "scale for shift": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"scale": tensor(1, 4)}),
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"shift": tensor(1, 4)}),
    ),
    "dtype of shift": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"shift": tensor(1, 4)}),
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"shift": tensor(1, 4, dtype=DType.FLOAT16)}),
    ),
    "rows of each sample": (
        job(2, 3, 4, tensors={"scale": tensor(2, 4)}),
        job(2, 3, 4, tensors={"scale": tensor(2, 3, 4)}),
    ),
    "rows that share a scale": (job(4, 4), job(4, 4, tensors={"scale": tensor(4)})),
    "gradients of samples of rows": tuple(
        job(2, 3, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(2, 3, 4), "scale": tensor(2, 4)})
        for _ in range(2)
    ),
    "samples without rows": tuple(job(2, 0, 4, tensors={"scale": tensor(2, 4)}) for _ in range(2)),
    "group shape": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2),
        job(1, 4, 7, op=Op.GROUP_NORM, num_groups=2),
    ),
}


@pytest.mark.parametrize("pair", STRANGERS.values(), ids=STRANGERS)
def test_strangers_do_not_share(batcher, pair):
    for each in pair:
        batcher.add(each)
    assert drained(batcher) == [[pair[0]], [pair[1]]]


KIN = {
    "one layer": (job(1, 4, layer=LAYER), job(3, 4, layer=LAYER)),
    "equal weights": (job(1, 4, tensors=WEIGHT), job(1, 4, tensors={"weight": tensor(4)})),
    "samples": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2),
        job(3, 4, 6, op=Op.GROUP_NORM, num_groups=2),
    ),
    "samples with their scale and shift": (
        job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"scale": tensor(1, 4), "shift": tensor(1, 4)}),
        job(3, 4, 6, op=Op.GROUP_NORM, num_groups=2, tensors={"shift": tensor(3, 4), "scale": tensor(3, 4)}),
    ),
    "samples of rows, each with its scale": (
        job(2, 3, 4, layer=LAYER, tensors={"scale": tensor(2, 4), "shift": tensor(2, 4)}),
        job(1, 3, 4, layer=LAYER, tensors={"scale": tensor(4), "shift": tensor(1, 1, 4)}),
    ),
    "backward with scale": tuple(
        job(
            samples,
            *(4, 6),
            op=Op.GROUP_NORM,
            direction=PassDirection.BACKWARD,
            num_groups=2,
            tensors={"dy": tensor(samples, 4, 6), "scale": tensor(samples, 4)},
        )
        for samples in (2, 1)
    ),
    "backward without parameters": (
        job(1, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(1, 4)}),
        job(2, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(2, 4)}),
    ),
}


@pytest.mark.parametrize("pair", KIN.values(), ids=KIN)
def test_kin_do(batcher, pair):
    for each in pair:
        batcher.add(each)
    assert drained(batcher) == [list(pair)]


def test_long_parameters_are_not_compared():
    batcher = Batcher(max_requests=8, max_bytes=2**30)
    pair = [job(1, 20_000, tensors={"weight": tensor(20_000)}) for _ in range(2)]
    for each in pair:
        batcher.add(each)
    assert drained(batcher) == [[pair[0]], [pair[1]]]
