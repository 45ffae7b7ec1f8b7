"""Jobs whose kernels are not there yet."""

import re
import time

import pytest
from normserve.engine.engine import EngineState
from normserve.errors import (
    ClientLeftError,
    DeadlineExceededError,
    DeviceFailureError,
    InvalidShapeError,
    NotReadyError,
    OverloadedError,
)

from tests.service.engine.fake_engine import compiling_scene, turn
from tests.service.jobs.fake_jobs import job


@compiling_scene
async def test_unforeseen_class_is_compiled_beside_the_work_of_others(scene):
    unforeseen = [scene.submit(job(rows, 8)) for rows in (1, 2)]
    await turn()
    assert len(scene.executor.compiling) == 1
    assert scene.executor.running == []
    foreseen = scene.submit(job(5, 4))
    await turn()
    scene.executor.finish()
    await foreseen
    scene.executor.end_compile()
    await turn()
    assert len(scene.executor.finish().jobs) == 2
    for each in unforeseen:
        await each
    again = scene.submit(job(3, 8))
    await turn()
    scene.executor.finish()
    await again
    text = scene.metrics.render().decode()
    assert "normserve_compiles_total 1.0" in text
    assert re.search(r"normserve_compile_seconds_total 0\.5", text)


@compiling_scene
async def test_whoever_waits_for_a_compile_may_leave_or_be_late(scene):
    gone = job(1, 8)
    leaving, late = scene.submit(gone), scene.submit(job(1, 8), deadline=time.perf_counter() + 0.001)
    await turn()
    scene.engine.cancel(gone)
    with pytest.raises(ClientLeftError):
        await leaving
    with pytest.raises(DeadlineExceededError):
        await late
    scene.executor.end_compile()
    await turn()
    assert scene.executor.running == []


@compiling_scene
async def test_compile_that_fails_is_its_classes_alone(scene):
    doomed = scene.submit(job(1, 8))
    await turn()
    scene.executor.end_compile(InvalidShapeError("no kernel takes that"))
    with pytest.raises(InvalidShapeError):
        await doomed
    again = scene.submit(job(1, 8))
    await turn()
    assert len(scene.executor.compiling) == 1
    again.cancel()


@compiling_scene
async def test_a_job_without_rows_needs_no_kernels(scene):
    result = scene.submit(job(0, 8))
    await turn()
    assert scene.executor.compiling == []
    await result
    unforeseen = scene.submit(job(1, 8))
    await turn()
    assert len(scene.executor.compiling) == 1
    unforeseen.cancel()


@compiling_scene
async def test_endless_classes_are_turned_away(scene):
    tasks = [scene.submit(job(1, cols)) for cols in range(5, 20)]
    await turn()
    assert len(scene.executor.compiling) == 3
    refused = [task for task in tasks if task.done()]
    for task in refused:
        with pytest.raises(OverloadedError):
            await task
    assert len(refused) == 12
    for task in set(tasks) - set(refused):
        task.cancel()


@compiling_scene
async def test_device_that_fails_answers_those_who_wait_for_a_compile(scene):
    waiting, doomed = scene.submit(job(1, 8)), scene.submit(job(1, 4))
    await turn()
    scene.executor.finish(DeviceFailureError("gone"))
    with pytest.raises(DeviceFailureError):
        await doomed
    with pytest.raises(NotReadyError):
        await waiting


@compiling_scene
async def test_device_that_fails_while_it_compiles_has_failed(scene):
    told = []
    scene.engine.on_failure = lambda: told.append(True)
    doomed = scene.submit(job(1, 8))
    await turn()
    scene.executor.end_compile(DeviceFailureError("gone"))
    with pytest.raises(DeviceFailureError):
        await doomed
    assert told == [True]
    assert scene.engine.state is EngineState.FAILED
