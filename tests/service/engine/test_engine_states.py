"""The engine under any sequence of requests, departures and launches that end well or not."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from normserve.errors import ClientLeftError, DeviceOutOfMemoryError, InvalidShapeError, NormserveError
from normserve.jobs.job import NormJob, QueueLane

from tests.service.engine.fake_engine import CompilingScene, Deep, turn
from tests.service.jobs.fake_jobs import job


class DeepCompiling(Deep):
    """Several batches at once, and kernels for rows of 4."""

    compiled_classes = frozenset({job(1, 4).compute_kernel_class()})


class Serving(RuleBasedStateMachine):
    """Requests of small and large tensors, with kernels that are there and kernels that must be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.told: list[object] = []
        self.loop.set_exception_handler(lambda loop, context: self.told.append(context))
        self.loop.run_until_complete(self.start())
        self.asked: dict[NormJob, asyncio.Task] = {}
        self.abandoned: set[NormJob] = set()
        self.launched: list[NormJob] = []

    async def start(self) -> None:
        self.scene = CompilingScene()
        self.executor = self.scene.executor
        self.executor.backend = DeepCompiling()
        self.executor.launches_quickly = False
        await self.scene.engine.start()
        self.scene.engine.accept_jobs()

    def play(self, *steps) -> None:
        async def run() -> None:
            for step in steps:
                step()
            await turn()

        self.loop.run_until_complete(run())
        running = [each for batch, _ in self.executor.running for each in batch.jobs]
        self.launched += [each for each in running if each not in self.launched]

    @rule(rows=st.sampled_from([1, 2, 300_000]), cols=st.sampled_from([4, 8]), count=st.integers(1, 3))
    def submit(self, rows, cols, count):
        jobs = [job(rows, cols) for _ in range(count)]
        self.play(lambda: self.asked.update({each: self.scene.submit(each) for each in jobs}))

    def drawn(self, data) -> NormJob:
        waiting = [each for each, task in self.asked.items() if not task.done()]
        return waiting[data.draw(st.integers(0, len(waiting) - 1))]

    @property
    def somebody_waits(self) -> bool:
        return any(not task.done() for task in self.asked.values())

    @precondition(lambda self: self.somebody_waits)
    @rule(data=st.data(), cancels=st.booleans(), as_a_launch_ends=st.booleans())
    def leave(self, data, cancels, as_a_launch_ends):
        gone = self.drawn(data)
        was_launched = gone in self.launched
        steps = [lambda: self.asked[gone].cancel() if cancels else self.scene.engine.cancel(gone)]
        if as_a_launch_ends and self.executor.running and not cancels:
            steps.append(self.executor.finish)
        self.play(*steps)
        if was_launched and not cancels:
            # It has its result, once it is there.
            return
        assert self.asked[gone].done()
        assert cancels or isinstance(self.asked[gone].exception(), ClientLeftError)
        if not was_launched:
            self.abandoned.add(gone)

    @precondition(lambda self: self.executor.launching)
    @rule()
    def end_launch(self):
        self.play(self.executor.end_launch)

    @precondition(lambda self: self.executor.running)
    @rule(fails=st.booleans())
    def finish(self, fails):
        ended: list = []
        error = DeviceOutOfMemoryError("dry") if fails else None
        self.play(lambda: ended.append(self.executor.finish(error)))
        for each in ended[0].jobs:
            task = self.asked[each]
            assert task.done()
            if task.cancelled() or isinstance(task.exception(), ClientLeftError):
                continue
            if fails:
                assert isinstance(task.exception(), DeviceOutOfMemoryError)
            else:
                assert task.result().tensors["y"] is each.x
                assert task.result().batch_size == len(ended[0].jobs)

    @precondition(lambda self: self.executor.compiling)
    @rule(fails=st.booleans())
    def end_compile(self, fails):
        error = InvalidShapeError("no kernel takes that") if fails else None
        self.play(lambda: self.executor.end_compile(error))

    @invariant()
    def device_has_no_more_than_it_takes(self):
        batches = [batch for batch, _ in self.executor.running]
        depth = Deep.launch_depth
        assert len(batches) <= depth.max_launches
        assert all(
            sum(batch.lane is lane for batch in batches) <= depth.max_launches_by_lane[lane] for lane in QueueLane
        )

    @invariant()
    def one_batch_at_a_time_is_launched(self):
        assert len(self.executor.launching) <= 1

    @invariant()
    def who_left_in_time_costs_no_launch(self):
        assert not self.abandoned & set(self.launched)

    @invariant()
    def device_is_not_idle_while_a_compiled_job_waits(self):
        waits = {each for each, task in self.asked.items() if not task.done()} - set(self.launched)
        ready = {each for each in waits if each.x.shape[-1] == 4}
        free = Deep.launch_depth.max_launches - len(self.executor.running)
        lanes = {QueueLane.SMALL if each.nbytes <= 10**6 else QueueLane.LARGE for each in ready}
        busy = {lane for lane in QueueLane if sum(b.lane is lane for b, _ in self.executor.running) >= 2}
        assert not (ready and free and lanes - busy) or self.executor.launching

    @invariant()
    def no_callback_fails(self):
        assert self.told == []

    def teardown(self) -> None:
        while self.executor.compiling or self.executor.running:
            if self.executor.compiling:
                self.play(self.executor.end_compile)
            if self.executor.running:
                self.play(self.executor.finish)
        for task in self.asked.values():
            assert task.done()
            assert task.cancelled() or task.exception() is None or isinstance(task.exception(), NormserveError)
        assert "normserve_queue_requests 0.0" in self.scene.metrics.render().decode()
        self.loop.close()


Serving.TestCase.settings = settings(max_examples=20, stateful_step_count=30)
TestServing = Serving.TestCase
