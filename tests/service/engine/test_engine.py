"""Jobs in, results out: what runs when, and with whom."""

import asyncio

import pytest
from normserve.errors import (
    DeviceOutOfMemoryError,
    DrainingError,
    NotReadyError,
)
from normserve.jobs.job import Op, QueueLane

from tests.service.engine.fake_engine import Deep, Quick, Scene, large_job, scene, turn
from tests.service.jobs.fake_jobs import job, tensor


@scene
async def test_result_comes_back_to_its_own_job(scene):
    lone = scene.submit(job(2, 4))
    await turn()
    waiting = [scene.submit(job(rows, 8)) for rows in (1, 3)]
    await turn()
    assert len(scene.executor.running) == 1
    scene.executor.finish()
    await turn()
    assert len(scene.executor.finish().jobs) == 2
    first = await lone
    assert (first.batch_size, first.kernel_bytes, first.launch_bytes) == (1, 2, 2)
    assert first.kernel_bandwidth == 2 / 0.5
    results = [await each for each in waiting]
    assert [result.tensors["y"].shape for result in results] == [(1, 8), (3, 8)]
    assert [result.kernel_bytes for result in results] == [1, 3]
    assert {result.batch_size for result in results} == {2}
    assert results[0].kernel_bandwidth == 4 / 0.5


@scene
async def test_the_time_of_a_launch_counts_once_however_many_share_it(scene):
    together = [scene.submit(job(rows, 4)) for rows in (1, 2, 3)]
    await turn()
    scene.executor.finish()
    results = [await each for each in together]
    # Each of them waited for the whole launch.
    assert [(each.copy_in_s, each.kernel_s, each.copy_out_s) for each in results] == [(0.1, 0.5, 0.2)] * 3
    lines = [line.rpartition(" ") for line in scene.metrics.render().decode().splitlines() if line[0] != "#"]
    counted = {name.removeprefix("normserve_"): float(value) for name, _, value in lines}
    kernel = 'op="layer_norm",pass="forward",dtype="float32"'
    assert counted[f"kernel_seconds_total{{{kernel}}}"] == 0.5
    assert counted[f"kernel_bytes_total{{{kernel}}}"] == 6
    assert counted['transfer_seconds_total{direction="in"}'] == 0.1
    assert counted['transfer_seconds_total{direction="out"}'] == 0.2
    assert (counted["batch_requests_count"], counted["batch_requests_sum"], counted["batch_bytes_sum"]) == (
        1,
        3,
        96,
    )


@scene
async def test_idle_device_never_waits_for_company(scene):
    running = scene.submit(job(1, 4))
    await turn()
    assert len(scene.executor.running) == 1
    scene.executor.finish()
    await running


@scene
async def test_what_comes_in_one_turn_of_the_loop_shares_a_launch(scene):
    together = [scene.submit(job(rows, 4)) for rows in (1, 2, 3)]
    await turn()
    assert len(scene.executor.finish().jobs) == 3
    for each in together:
        await each


@scene
async def test_device_with_wires_of_its_own_gets_several_batches_at_once(scene):
    scene.executor.backend = Deep()
    tasks = [scene.submit(large_job()) for _ in range(3)]
    await turn()
    assert [batch.lane for batch, _ in scene.executor.running] == [QueueLane.LARGE] * 2
    tasks.append(scene.submit(job(1, 4)))
    await turn()
    # The small one has a lane of its own, which the large one that came before it may not take.
    assert [batch.lane for batch, _ in scene.executor.running] == [QueueLane.LARGE] * 2 + [QueueLane.SMALL]
    tasks.append(scene.submit(job(1, 5)))
    await turn()
    assert len(scene.executor.running) == 3
    while scene.executor.running:
        scene.executor.finish()
        await turn()
    for each in tasks:
        await each


@scene
async def test_idle_device_runs_what_is_tiny_where_it_comes_from(scene):
    scene.executor.backend = Quick()
    together = [scene.submit(job(1, 4)) for _ in range(2)]
    for each in together:
        await each
    assert [len(batch.jobs) for batch in scene.executor.here] == [2]
    large = scene.submit(job(100, 4))
    await turn()
    # One device, one thing at a time.
    tiny = scene.submit(job(1, 4))
    await turn()
    assert len(scene.executor.here) == 1
    scene.executor.finish()
    await large
    await tiny
    assert len(scene.executor.here) == 2


@scene
async def test_what_takes_long_where_it_came_from_keeps_the_device_to_itself(scene):
    scene.executor.backend = Quick()
    scene.executor.is_slow = True
    first = scene.submit(job(1, 4))
    await turn()
    second = scene.submit(job(1, 4))
    await turn()
    assert len(scene.executor.here) == 1
    assert not first.done()
    scene.executor.finish()
    await first
    assert len(scene.executor.here) == 2
    scene.executor.finish()
    await second


@scene
async def test_what_is_alone_and_small_enough_is_no_large_batch(scene):
    scene.executor.backend = Quick()
    scene.executor.backend.max_inline_bytes = large_job().nbytes
    await scene.submit(large_job())
    assert [batch.lane for batch in scene.executor.here] == [QueueLane.SMALL]


@scene
async def test_what_is_quick_to_launch_is_launched_where_it_comes_from(scene):
    scene.executor.backend = Deep()
    scene.executor.launches_at_once = True
    tasks = [scene.submit(large_job()) for _ in range(3)]
    await turn()
    # As many as the device takes at once, in its lane.
    assert len(scene.executor.here) == len(scene.executor.running) == 2
    assert not scene.engine.launch_progress.is_idle
    scene.executor.finish()
    await tasks[0]
    assert len(scene.executor.here) == 3
    scene.executor.finish()
    scene.executor.finish()
    for each in tasks:
        await each


@scene
async def test_a_flight_that_lands_soon_is_left_to_no_thread(scene):
    executor = scene.executor
    executor.backend = Deep()
    executor.launches_at_once = True
    executor.poll_s = 60.0
    executor.lands_at_look = 3
    first, second = (scene.submit(large_job()) for _ in range(2))
    await turn()
    # Both were launched by then, and looked at by turns.
    assert first.done() != second.done()
    assert executor.running == []
    executor.lands_at_look = executor.looks + 1
    await turn()
    assert first.done()
    assert second.done()
    looks = executor.looks
    await turn()
    assert executor.looks == looks


@scene
async def test_a_flight_that_takes_long_is_left_to_a_thread(scene):
    executor = scene.executor
    executor.backend = Deep()
    executor.launches_at_once = True
    executor.poll_s = 0.1
    task = scene.submit(large_job())
    await turn()
    assert executor.looks > 1
    while not executor.running:
        await asyncio.sleep(0.01)
    executor.finish()
    await task


@scene
async def test_the_executors_thread_gets_one_batch_at_a_time_to_launch(scene):
    executor = scene.executor
    executor.backend = Deep()
    executor.launches_quickly = False
    tasks = [scene.submit(large_job()) for _ in range(3)]
    await turn()
    assert executor.handed_over == 1
    # By now the next one could be launched at once: it waits all the same, and is not handed over.
    executor.launches_at_once = True
    tasks.append(scene.submit(large_job()))
    await turn()
    assert executor.handed_over == 1
    assert executor.here == []
    executor.end_launch()
    await turn()
    assert executor.handed_over == 1
    assert len(executor.here) == 1
    for each in tasks:
        executor.finish()
        await each


@scene
async def test_a_batch_that_fails_before_its_launch_is_followed_by_the_next(scene):
    scene.executor.backend = Deep()
    scene.executor.launches_quickly = False
    tasks = [scene.submit(large_job()) for _ in range(2)]
    await turn()
    scene.executor.finish(error=DeviceOutOfMemoryError("too much"))
    with pytest.raises(DeviceOutOfMemoryError):
        await tasks[0]
    assert scene.executor.handed_over == 2
    scene.executor.finish()
    await tasks[1]


@scene
async def test_small_request_behind_many_large_ones_waits_for_one_of_them(scene):
    large = [scene.submit(large_job()) for _ in range(4)]
    await turn()
    small = scene.submit(job(1, 4))
    await turn()
    scene.executor.finish()
    await turn()
    scene.executor.finish()
    await small
    assert sum(each.done() for each in large) == 1
    while scene.executor.running:
        scene.executor.finish()
        await turn()
    for each in large:
        await each


@scene
async def test_closed_engine_finishes_what_it_has(scene):
    running = scene.submit(job(1, 4))
    await turn()
    scene.engine.start_draining()
    with pytest.raises(DrainingError):
        scene.engine.require_ready()
    scene.executor.finish()
    await running


@scene
async def test_closed_engine_stays_closed(scene):
    scene.engine.start_draining()
    scene.engine.accept_jobs()
    with pytest.raises(DrainingError):
        scene.engine.require_ready()


@scene
async def test_giving_up_answers_everybody_who_waits(scene):
    running, waiting = scene.submit(job(1, 4)), scene.submit(job(1, 8))
    await turn()
    scene.engine.start_draining()
    scene.engine.fail_pending_jobs()
    for each in (running, waiting):
        with pytest.raises(DrainingError):
            await each
    scene.executor.finish()
    await turn()
    assert scene.executor.running == []


@scene
async def test_stopping_stops_the_executor(scene):
    scene.engine.stop(1.5)
    assert scene.executor.stopped_within == 1.5


@scene
async def test_metrics_tell_of_the_device_the_queue_and_the_launches(scene):
    def scraped() -> str:
        return scene.metrics.render().decode()

    assert scene.engine.backend_name == "fake"
    assert 'normserve_device_copy_bandwidth_bytes_per_second{device="a device"} 1000000000.0' in scraped()
    assert 'normserve_device_memory_bytes{kind="allocated"} 7.0' in scraped()
    tasks = [scene.submit(job(1, cols)) for cols in (4, 8, 16)]
    await turn()
    assert "normserve_queue_requests 2.0" in scraped()
    while scene.executor.running:
        scene.executor.finish()
        await turn()
    for each in tasks:
        await each
    assert "normserve_queue_requests 0.0" in scraped()
    assert "normserve_batch_requests_count 3" in scraped()


def test_starting_tells_what_the_device_is():
    started = Scene()
    device = asyncio.run(started.engine.start())
    assert device is started.engine.device_description
    assert device.name == "a device"


@scene
async def test_parameters_are_loaded_by_the_device(scene):
    weight = tensor(4)
    assert await scene.engine.load_parameters(Op.RMS_NORM, weight, None) == "resident"
    assert scene.executor.loaded == [(Op.RMS_NORM, weight, None)]


def test_engine_takes_nothing_before_it_is_open():
    started = Scene()
    with pytest.raises(NotReadyError, match="warming up"):
        started.engine.require_ready()
    assert started.engine.backend_name == ""
