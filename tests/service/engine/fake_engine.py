"""An engine on a device that does what a test says, and tests that are coroutines."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from normserve.backends.interface import ONE_AT_A_TIME, LaunchDepth, PendingLaunch
from normserve.engine.batcher import Batcher
from normserve.engine.compilation_queue import CompilationQueue
from normserve.engine.engine import Engine
from normserve.engine.executor import WorkOutcome
from normserve.errors import DeviceFailureError, NormserveError
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, NormResult, QueueLane
from normserve.metrics.metrics import Metrics

from tests.service.jobs.fake_jobs import job

FAR = 1e9


class FakeBackend:
    name = "fake"
    launch_depth = ONE_AT_A_TIME
    compiled_classes = None
    max_inline_bytes = 0

    def read_memory_bytes(self):
        return {"allocated": 7}

    def is_better_unbatched(self, job):
        return False


class Flying(PendingLaunch):
    """Lands when the test says so."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def wait(self):
        raise AssertionError("nobody waits for it")

    def poll(self, seconds):
        return False


class FakeExecutor:
    """Keeps what it is given until the test says what became of it."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.running: list[tuple[Batch, Callable]] = []
        self.here: list[Batch] = []
        self.handed_over = 0
        self.launching: list[tuple[Batch, Callable]] = []
        self.launches_quickly = True
        self.poll_s = 0.0
        self.looks = 0
        self.lands_at_look: int | None = None
        self.is_slow = False
        self.launches_at_once = False
        self.loaded: list = []
        self.compiling: list[tuple[NormJob, Callable]] = []
        self.stopped_within: float | None = None

    def start(self, reply):
        reply(WorkOutcome(0.0, value=DeviceDescription("a device", "cpu", 1e9, {})))

    def submit_batch(self, batch, on_launched, reply):
        self.handed_over += 1
        self.running.append((batch, reply))
        self.launching.append((batch, on_launched))
        if self.launches_quickly:
            self.end_launch()

    def is_inline_size(self, batch):
        return batch.nbytes <= self.backend.max_inline_bytes

    def can_launch_inline(self, batch):
        return self.launches_at_once

    def launch_inline(self, batch):
        self.here.append(batch)
        return WorkOutcome(time.perf_counter(), value=Flying(batch))

    def run_and_poll_inline(self, batch):
        self.here.append(batch)
        return WorkOutcome(time.perf_counter(), value=Flying(batch)) if self.is_slow else self._outcome(batch)

    def poll_launch(self, outcome):
        self.looks += 1
        return self._outcome(outcome.value.batch) if self.looks == self.lands_at_look else None

    def submit_wait(self, outcome, lane, reply):
        self.running.append((outcome.value.batch, reply))

    def translate_error(self, error):
        return DeviceFailureError(str(error))

    def submit_parameters(self, op, weight, bias, reply):
        self.loaded.append((op, weight, bias))
        reply(WorkOutcome(0.0, value="resident"))

    def submit_compilation(self, job, reply):
        self.compiling.append((job, reply))

    def stop(self, timeout_s):
        self.stopped_within = timeout_s

    def end_compile(self, error=None) -> None:
        _, reply = self.compiling.pop(0)
        reply(WorkOutcome(time.perf_counter() - 0.5, error=error))

    def end_launch(self) -> None:
        """What was handed over is in flight."""
        batch, on_launched = self.launching.pop()
        on_launched(WorkOutcome(time.perf_counter(), value=Flying(batch)))

    def finish(self, error=None) -> Batch:
        """End the oldest launch."""
        batch, reply = self.running.pop(0)
        self.launching = [each for each in self.launching if each[0] is not batch]
        if error is not None:
            reply(WorkOutcome(time.perf_counter(), error=error))
        else:
            reply(self._outcome(batch))
        return batch

    @staticmethod
    def _outcome(batch) -> WorkOutcome:
        outputs = tuple({"y": each.x} for each in batch.jobs)
        execution = BatchResult(outputs, tuple(each.rows for each in batch.jobs), 0.1, 0.5, 0.2)
        return WorkOutcome(time.perf_counter(), value=execution)


class Scene:
    def __init__(self) -> None:
        self.executor = FakeExecutor()
        self.metrics = Metrics()
        batcher = Batcher(max_requests=8, max_bytes=10**6)
        self.engine = Engine(
            self.executor, batcher, CompilationQueue(max_classes=4, max_per_minute=60), self.metrics
        )

    def submit(self, work, deadline: float = FAR) -> asyncio.Task:
        """Begin a job in a task that has its result or raises its error; cancelled, it ends the job."""
        return asyncio.ensure_future(self._computed(work, deadline))

    async def _computed(self, work: NormJob, deadline: float) -> NormResult:
        ended: asyncio.Future[NormResult | NormserveError] = asyncio.get_running_loop().create_future()
        self.engine.submit(work, deadline, ended.set_result)
        try:
            result = await ended
        finally:
            self.engine.release(work)
            del ended
        if not isinstance(result, NormserveError):
            return result
        try:
            raise result
        finally:
            # The traceback holds this frame, and with it the job.
            del result, work


class Quick(FakeBackend):
    """Runs what is tiny where it comes from."""

    max_inline_bytes = 64


class Deep(FakeBackend):
    """Takes several batches at once."""

    launch_depth = LaunchDepth(3, {QueueLane.SMALL: 2, QueueLane.LARGE: 2})


def large_job() -> NormJob:
    return job(300_000, 1)


class Compiling(FakeBackend):
    """Has kernels for rows of 4."""

    compiled_classes = frozenset({job(1, 4).compute_kernel_class()})


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
            with_engine.engine.accept_jobs()
            await play(with_engine)

        asyncio.run(run())

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test
