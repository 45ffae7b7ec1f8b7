"""Who waits for a job is told once, in time, and each for itself."""

import asyncio
import time

import pytest
from normserve.engine.waiters import Replies
from normserve.errors import DeadlineExceededError, DeviceOutOfMemoryError
from normserve.jobs.job import Batch, Execution

from tests.service.jobs.fake_jobs import job

FAR = 1e9


def on_a_loop(play):
    def test() -> None:
        asyncio.run(play())

    return test


def execution_of(*jobs) -> Execution:
    return Execution(tuple({"y": each.x} for each in jobs), tuple(10 * each.rows for each in jobs), 0.1, 0.5, 0.2)


@on_a_loop
async def test_each_gets_its_own_and_what_the_launch_cost():
    replies, jobs = Replies(pytest.fail), (job(1, 4), job(3, 4))
    futures = [replies.expect(each, FAR) for each in jobs]
    replies.note_start(Batch(jobs))
    replies.give(Batch(jobs), execution_of(*jobs), time.perf_counter())
    for each, future in zip(jobs, futures, strict=True):
        result = await future
        assert result.tensors["y"] is each.x
        assert (result.kernel_bytes, result.launch_bytes, result.batch_size) == (10 * each.rows, 40, 2)


@on_a_loop
async def test_whoever_waits_no_more_is_left_out():
    replies, here, left = Replies(pytest.fail), job(1, 4), job(1, 4)
    future = replies.expect(here, FAR)
    replies.expect(left, FAR)
    replies.forget(left)
    assert replies.is_awaited(here)
    assert not replies.is_awaited(left)
    replies.give(Batch((here, left)), execution_of(here, left), time.perf_counter())
    assert (await future).batch_size == 2
    assert not replies.is_awaited(here)


@on_a_loop
async def test_late_job_is_taken_out_before_its_caller_hears_of_it():
    late = []
    replies, work = Replies(late.append), job(1, 4)
    future = replies.expect(work, time.perf_counter() + 0.001)
    future.add_done_callback(lambda _: late.append("told"))
    replies.keep_deadline(work)
    with pytest.raises(DeadlineExceededError):
        await future
    await asyncio.sleep(0)
    assert late == [work, "told"]


@on_a_loop
async def test_what_runs_is_late_no_more():
    replies, work = Replies(pytest.fail), job(1, 4)
    future = replies.expect(work, time.perf_counter() + 0.1)
    replies.keep_deadline(work)
    replies.note_start(Batch((work,)))
    replies.keep_deadline(work)
    await asyncio.sleep(0.11)
    assert not future.done()


@on_a_loop
async def test_deadline_that_has_passed_is_not_waited_for():
    replies, work = Replies(pytest.fail), job(1, 4)
    with pytest.raises(DeadlineExceededError):
        replies.expect(work, time.perf_counter())
    assert not replies.is_awaited(work)


@on_a_loop
async def test_errors_are_not_shared():
    replies, jobs = Replies(pytest.fail), (job(1, 4), job(1, 4))
    futures = [replies.expect(each, FAR) for each in jobs]
    error = DeviceOutOfMemoryError("dry")
    replies.refuse_all(error)
    raised = [future.exception() for future in futures]
    assert [str(each) for each in raised] == ["dry", "dry"]
    assert len({id(each) for each in (*raised, error)}) == 3
