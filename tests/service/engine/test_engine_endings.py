"""Deadlines, departures and failures: whoever waits is told, and the device does nothing in vain."""

import asyncio
import time

import pytest
from normserve.engine.engine import EngineState
from normserve.errors import (
    ClientLeftError,
    DeadlineExceededError,
    DeviceFailureError,
    DeviceOutOfMemoryError,
    NotReadyError,
)
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DType, HostTensor

from tests.garbage_collector import without_collector
from tests.service.engine.fake_engine import Deep, large_job, scene, turn
from tests.service.jobs.fake_jobs import job


@scene
async def test_failed_device_gets_no_further_work(scene):
    scene.executor.backend = Deep()
    launched = [scene.submit(large_job()) for _ in range(2)]
    await turn()
    queued = [scene.submit(large_job()) for _ in range(2)]
    await turn()
    scene.executor.finish(DeviceFailureError("gone"))
    await turn()
    # The other one in flight still answers, or not.
    scene.executor.finish(DeviceFailureError("gone"))
    await turn()
    assert scene.executor.running == []
    for each in launched:
        with pytest.raises(DeviceFailureError):
            await each
    for each in queued:
        with pytest.raises(NotReadyError):
            await each


@scene
async def test_deadline_is_kept_while_the_device_is_busy(scene):
    running = scene.submit(job(1, 4))
    await turn()
    late = scene.submit(job(1, 8), deadline=time.perf_counter() + 0.001)
    with pytest.raises(DeadlineExceededError):
        await late
    scene.executor.finish()
    await running
    assert scene.executor.running == []


@scene
async def test_deadline_that_has_passed_is_never_queued(scene):
    with pytest.raises(DeadlineExceededError):
        await scene.submit(job(1, 8), deadline=time.perf_counter() - 1)
    assert scene.executor.running == []


@scene
async def test_deadline_is_to_the_start_not_to_the_end(scene):
    running = scene.submit(job(1, 4), deadline=time.perf_counter() + 0.2)
    await turn()
    await asyncio.sleep(0.21)
    scene.executor.finish()
    await running


@scene
async def test_client_that_left_the_queue_costs_no_launch(scene):
    running, gone = scene.submit(job(1, 4)), job(1, 8)
    leaving = scene.submit(gone)
    await turn()
    scene.engine.cancel(gone)
    with pytest.raises(ClientLeftError):
        await leaving
    scene.executor.finish()
    await running
    assert scene.executor.running == []


@scene
async def test_client_that_left_a_launch_does_not_disturb_it(scene):
    gone, stays = job(1, 4), job(1, 8)
    leaving, staying = scene.submit(gone), scene.submit(stays)
    await turn()
    scene.engine.cancel(gone)
    await turn()
    # The device works for it still, and who asked is told no sooner that its memory is free.
    assert not leaving.done()
    scene.executor.finish()
    await leaving
    scene.executor.finish()
    await staying


@scene
async def test_cancelled_submission_leaves_the_queue(scene):
    running, cancelled = scene.submit(job(1, 4)), scene.submit(job(1, 8))
    await turn()
    cancelled.cancel()
    await turn()
    scene.executor.finish()
    await running
    assert scene.executor.running == []


@scene
async def test_out_of_memory_is_that_launch_alone(scene):
    dry = scene.submit(job(1, 4))
    await turn()
    scene.executor.finish(DeviceOutOfMemoryError("dry"))
    with pytest.raises(DeviceOutOfMemoryError):
        await dry
    well = scene.submit(job(1, 4))
    await turn()
    scene.executor.finish()
    await well
    assert scene.engine.state is EngineState.READY


@scene
async def test_what_failed_does_not_wait_for_the_collector_to_give_its_slabs_back(scene):
    pool = SlabPool(max_idle_bytes=0)
    with without_collector():
        late = scene.submit(slab_job(pool))
        await turn()
        later = scene.submit(slab_job(pool), deadline=time.perf_counter() + 0.001)
        with pytest.raises(DeadlineExceededError):
            await later
        scene.executor.finish(raised_by_a_device(slab_job(pool)))
        with pytest.raises(DeviceOutOfMemoryError):
            await late
        del late, later
        await turn()
        assert pool.used_bytes == 0


def slab_job(pool: SlabPool):
    return job(1, 8, tensors={"x": HostTensor(DType.FLOAT32, (1, 8), pool.borrow(32)[:32])})


def raised_by_a_device(held) -> DeviceOutOfMemoryError:
    """An error whose traceback holds a job."""
    try:
        raise DeviceOutOfMemoryError(f"no room for {held.rows} rows")
    except DeviceOutOfMemoryError as error:
        return error


@scene
async def test_device_failure_answers_everybody_and_is_told_once(scene):
    told = []
    scene.engine.on_failure = lambda: told.append(True)
    doomed, *queued = [scene.submit(job(1, size)) for size in (4, 5, 6)]
    await turn()
    scene.executor.finish(DeviceFailureError("gone"))
    with pytest.raises(DeviceFailureError):
        await doomed
    # What the device was not given cannot have been the cause, and may be sent again.
    for each in (*queued, scene.submit(job(1, 4))):
        with pytest.raises(NotReadyError):
            await each
    with pytest.raises(NotReadyError):
        scene.engine.require_ready()
    scene.engine.start_draining()
    assert scene.engine.state is EngineState.FAILED
    assert told == [True]
    assert scene.executor.running == []


@scene
async def test_device_failure_answers_who_came_in_the_same_turn(scene):
    running = scene.submit(job(1, 4))
    await turn()
    late = scene.submit(job(1, 8))
    scene.executor.finish(DeviceFailureError("gone"))
    with pytest.raises(DeviceFailureError):
        await asyncio.wait_for(running, 5)
    with pytest.raises(NotReadyError):
        await asyncio.wait_for(late, 5)
