"""Jobs in, results out: deadlines, departures and failures, on a device that does what it is told."""

import asyncio
import gc
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from normserve.backends.base import ONE_AT_A_TIME, Depth
from normserve.batcher import Batcher
from normserve.compilation import Compilation
from normserve.device import DeviceInfo
from normserve.engine import Engine, State
from normserve.errors import (
    ClientLeftError,
    DeadlineExceededError,
    DeviceFailureError,
    DeviceOutOfMemoryError,
    DrainingError,
    InvalidShapeError,
    NotReadyError,
    OverloadedError,
)
from normserve.executor import Outcome
from normserve.jobs import Batch, Execution, Lane, NormJob, Op
from normserve.metrics import Metrics
from normserve.slabs import SlabPool
from normserve.tensors import DType, HostTensor

from .fake_jobs import job, tensor

FAR = 1e9


class FakeBackend:
    name = "fake"
    depth = ONE_AT_A_TIME
    compiled = None
    inline_bytes = 0

    def memory_bytes(self):
        return {"allocated": 7}


class FakeExecutor:
    """Keeps what it is given until the test says what became of it."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.running: list[tuple[Batch, Callable]] = []
        self.here: list[Batch] = []
        self.loaded: list = []
        self.compiling: list[tuple[NormJob, Callable]] = []

    def start(self, reply):
        reply(Outcome(0.0, value=DeviceInfo("a device", "cpu", 1e9, {})))

    def run(self, batch, reply):
        self.running.append((batch, reply))

    def run_here(self, batch):
        self.here.append(batch)
        return self._outcome(batch)

    def load(self, op, weight, bias, reply):
        self.loaded.append((op, weight, bias))
        reply(Outcome(0.0, value="resident"))

    def compile(self, job, reply):
        self.compiling.append((job, reply))

    def stop(self, timeout_s):
        pass

    def end_compile(self, error=None) -> None:
        _, reply = self.compiling.pop(0)
        reply(Outcome(time.perf_counter() - 0.5, error=error))

    def finish(self, error=None) -> Batch:
        """End the oldest launch."""
        batch, reply = self.running.pop(0)
        if error is not None:
            reply(Outcome(time.perf_counter(), error=error))
        else:
            reply(self._outcome(batch))
        return batch

    @staticmethod
    def _outcome(batch) -> Outcome:
        outputs = tuple({"y": each.x} for each in batch.jobs)
        execution = Execution(outputs, tuple(each.rows for each in batch.jobs), 0.1, 0.5, 0.2)
        return Outcome(time.perf_counter(), value=execution)


class Scene:
    def __init__(self) -> None:
        self.executor = FakeExecutor()
        self.metrics = Metrics()
        batcher = Batcher(max_requests=8, max_bytes=10**6)
        self.engine = Engine(self.executor, batcher, Compilation(max_classes=4, max_per_minute=60), self.metrics)

    def submit(self, work, deadline: float = FAR) -> asyncio.Task:
        return asyncio.ensure_future(self.engine.submit(work, deadline))


class Quick(FakeBackend):
    inline_bytes = 64


class Compiling(FakeBackend):
    """Has kernels for rows of 4."""

    compiled = frozenset({job(1, 4).kernel_class()})


async def turn() -> None:
    """Let everything that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


class CompilingScene(Scene):
    def __init__(self) -> None:
        super().__init__()
        self.executor.backend = Compiling()


def scene(play: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine and is given a started engine."""

    return _with_engine(play, Scene)


def compiling_scene(play: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The same on a device that compiles."""
    return _with_engine(play, CompilingScene)


def _with_engine(play, make: type[Scene]) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            with_engine = make()
            await with_engine.engine.start()
            with_engine.engine.open()
            await play(with_engine)

        asyncio.run(run())

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


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


class Deep(FakeBackend):
    depth = Depth(3, {Lane.SMALL: 2, Lane.LARGE: 2})


def large_job():
    return job(300_000, 1)


@scene
async def test_device_with_wires_of_its_own_gets_several_batches_at_once(scene):
    scene.executor.backend = Deep()
    tasks = [scene.submit(large_job()) for _ in range(3)]
    await turn()
    assert [batch.lane for batch, _ in scene.executor.running] == [Lane.LARGE] * 2
    tasks.append(scene.submit(job(1, 4)))
    await turn()
    # The small one has a lane of its own, which the large one that came before it may not take.
    assert [batch.lane for batch, _ in scene.executor.running] == [Lane.LARGE] * 2 + [Lane.SMALL]
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
    scene.engine.abandon(gone)
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
    for each in (waiting, doomed):
        with pytest.raises(DeviceFailureError):
            await each


@scene
async def test_failed_device_gets_no_further_work(scene):
    scene.executor.backend = Deep()
    doomed = [scene.submit(large_job()) for _ in range(4)]
    await turn()
    scene.executor.finish(DeviceFailureError("gone"))
    await turn()
    # The other one in flight still answers, or not.
    scene.executor.finish(DeviceFailureError("gone"))
    await turn()
    assert scene.executor.running == []
    for each in doomed:
        with pytest.raises(DeviceFailureError):
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
    running = scene.submit(job(1, 4), deadline=time.perf_counter() + 0.02)
    await turn()
    await asyncio.sleep(0.03)
    scene.executor.finish()
    await running


@scene
async def test_client_that_left_the_queue_costs_no_launch(scene):
    running, gone = scene.submit(job(1, 4)), job(1, 8)
    leaving = scene.submit(gone)
    await turn()
    scene.engine.abandon(gone)
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
    scene.engine.abandon(gone)
    with pytest.raises(ClientLeftError):
        await leaving
    scene.executor.finish()
    await turn()
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
    assert scene.engine.state is State.READY


@scene
async def test_what_failed_does_not_wait_for_the_collector_to_give_its_slabs_back(scene):
    pool = SlabPool(max_idle_bytes=0)
    gc.disable()
    try:
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
    finally:
        gc.enable()


def slab_job(pool: SlabPool):
    return job(1, 8, tensors={"x": HostTensor(DType.FLOAT32, (1, 8), pool.take(32)[:32])})


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
    doomed = [scene.submit(job(1, size)) for size in (4, 5, 6)]
    await turn()
    scene.executor.finish(DeviceFailureError("gone"))
    for each in doomed:
        with pytest.raises(DeviceFailureError):
            await each
    with pytest.raises(DeviceFailureError):
        await scene.submit(job(1, 4))
    with pytest.raises(NotReadyError):
        scene.engine.require_ready()
    scene.engine.close()
    assert scene.engine.state is State.FAILED
    assert told == [True]
    assert scene.executor.running == []


@scene
async def test_closed_engine_finishes_what_it_has(scene):
    running = scene.submit(job(1, 4))
    await turn()
    scene.engine.close()
    with pytest.raises(DrainingError):
        scene.engine.require_ready()
    scene.executor.finish()
    await running


@scene
async def test_parameters_are_loaded_by_the_device(scene):
    weight = tensor(4)
    assert await scene.engine.load(Op.RMS_NORM, weight, None) == "resident"
    assert scene.executor.loaded == [(Op.RMS_NORM, weight, None)]


def test_engine_takes_nothing_before_it_is_open():
    started = Scene()
    with pytest.raises(NotReadyError, match="warming up"):
        started.engine.require_ready()
    assert started.engine.backend_name == ""
