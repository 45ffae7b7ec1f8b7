"""Who waits for a job is told once, in time, and each for itself."""

import asyncio
import functools
import time

import pytest
from normserve.engine.pending_jobs import PendingJobs
from normserve.errors import DeadlineExceededError, DeviceOutOfMemoryError
from normserve.jobs.job import Batch, BatchResult

from tests.service.jobs.fake_jobs import job

FAR = 1e9


def on_a_loop(play):
    def test() -> None:
        asyncio.run(play())

    return test


def execution_of(*jobs) -> BatchResult:
    return BatchResult(tuple({"y": each.x} for each in jobs), tuple(10 * each.rows for each in jobs), 0.1, 0.5, 0.2)


@on_a_loop
async def test_each_gets_its_own_and_what_the_launch_cost():
    replies, jobs, told = PendingJobs(pytest.fail), (job(1, 4), job(3, 4)), []
    for each in jobs:
        replies.add(each, FAR, told.append)
    replies.record_start(Batch(jobs))
    replies.resolve(Batch(jobs), execution_of(*jobs), time.perf_counter())
    for each, result in zip(jobs, told, strict=True):
        assert result.tensors["y"] is each.x
        assert (result.kernel_bytes, result.launch_bytes, result.batch_size) == (10 * each.rows, 40, 2)


@on_a_loop
async def test_whoever_waits_no_more_is_left_out():
    replies, here, left, told = PendingJobs(pytest.fail), job(1, 4), job(1, 4), []
    replies.add(here, FAR, told.append)
    replies.add(left, FAR, pytest.fail)
    replies.remove(left)
    assert replies.is_pending(here)
    assert not replies.is_pending(left)
    replies.resolve(Batch((here, left)), execution_of(here, left), time.perf_counter())
    (result,) = told
    assert result.batch_size == 2
    assert not replies.is_pending(here)


@on_a_loop
async def test_each_is_told_once():
    replies, work, told = PendingJobs(pytest.fail), job(1, 4), []
    replies.add(work, FAR, told.append)
    replies.fail((work,), DeviceOutOfMemoryError("dry"))
    replies.resolve(Batch((work,)), execution_of(work), time.perf_counter())
    replies.fail_all(DeviceOutOfMemoryError("again"))
    assert [str(each) for each in told] == ["dry"]


@on_a_loop
async def test_who_is_told_may_forget_its_job_and_ask_again():
    replies, jobs, next_job, told = PendingJobs(pytest.fail), (job(1, 4), job(1, 4)), job(1, 4), []

    def ask_again(result):
        told.append(result)
        replies.remove(jobs[0])
        replies.add(next_job, FAR, told.append)

    replies.add(jobs[0], FAR, ask_again)
    replies.add(jobs[1], FAR, told.append)
    replies.record_start(Batch(jobs))
    replies.resolve(Batch(jobs), execution_of(*jobs), time.perf_counter())
    # It has run: there is no deadline to keep.
    replies.begin_deadline_timer(jobs[0])
    assert len(told) == 2
    assert replies.is_pending(next_job)


@on_a_loop
async def test_late_job_is_taken_out_before_its_caller_hears_of_it():
    late, told = [], asyncio.Event()
    replies, work = PendingJobs(late.append), job(1, 4)

    def hear(error):
        late.append(type(error))
        told.set()

    replies.add(work, time.perf_counter() + 0.001, hear)
    replies.begin_deadline_timer(work)
    await told.wait()
    assert late == [work, DeadlineExceededError]


@on_a_loop
async def test_each_is_late_at_its_own_time_in_whatever_order_they_came():
    late, told, deadlines = [], {}, []
    replies, jobs, all_told = PendingJobs(late.append), [job(1, 4) for _ in range(4)], asyncio.Event()

    def hear(number, error):
        told[number] = type(error), time.perf_counter()
        if len(told) == 2:
            all_told.set()

    # The timer is set, set to an earlier time, left as it is, and set once more after it has ended.
    for number, seconds in enumerate((60.0, 0.01, 0.05, 60.0)):
        deadlines.append(time.perf_counter() + seconds)
        replies.add(jobs[number], deadlines[number], functools.partial(hear, number))
        replies.begin_deadline_timer(jobs[number])
    await all_told.wait()
    assert late == [jobs[1], jobs[2]]
    assert {error for error, _ in told.values()} == {DeadlineExceededError}
    assert all(told[number][1] >= deadlines[number] for number in (1, 2))
    assert replies.is_pending(jobs[0])
    assert replies.is_pending(jobs[3])


@on_a_loop
async def test_a_deadline_is_kept_though_an_earlier_one_counts_no_more():
    late, told = [], asyncio.Event()
    replies, runs, gone, waits = PendingJobs(late.append), job(1, 4), job(1, 4), job(1, 4)
    for number, each in enumerate((runs, gone, waits)):
        replies.add(each, time.perf_counter() + 0.01 * (number + 1), lambda _: told.set())
        replies.begin_deadline_timer(each)
    replies.record_start(Batch((runs,)))
    replies.remove(gone)
    await told.wait()
    assert late == [waits]


@on_a_loop
async def test_what_runs_is_late_no_more():
    replies, work = PendingJobs(pytest.fail), job(1, 4)
    replies.add(work, time.perf_counter() + 0.1, pytest.fail)
    replies.begin_deadline_timer(work)
    replies.record_start(Batch((work,)))
    replies.begin_deadline_timer(work)
    await asyncio.sleep(0.11)


@on_a_loop
async def test_deadline_that_has_passed_is_not_waited_for():
    replies, work = PendingJobs(pytest.fail), job(1, 4)
    with pytest.raises(DeadlineExceededError):
        replies.add(work, time.perf_counter(), pytest.fail)
    assert not replies.is_pending(work)


@on_a_loop
async def test_errors_are_not_shared():
    replies, jobs, told = PendingJobs(pytest.fail), (job(1, 4), job(1, 4)), []
    for each in jobs:
        replies.add(each, FAR, told.append)
    error = DeviceOutOfMemoryError("dry")
    replies.fail_all(error)
    assert [str(each) for each in told] == ["dry", "dry"]
    assert len({id(each) for each in (*told, error)}) == 3
