"""An operation over HTTP between its body and its response: its memory, its deadline, and a client that leaves."""

import asyncio
import time
import weakref
from dataclasses import replace

import pytest
from normserve.errors import ClientLeftError, DeadlineExceededError, DeviceOutOfMemoryError, TooLargeError
from normserve.jobs.job import NormResult, NormSpec, Op, PassDirection
from normserve.jobs.validation import make_validated_job

from tests.garbage_collector import without_collector
from tests.service.engine.fake_engine import turn
from tests.service.http.fake_exchanges import ExchangeScene
from tests.service.jobs.fake_jobs import tensor

SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5)


class Asked(ExchangeScene):
    """An operation whose body has been received."""

    def __init__(self, *, rows: int = 2, **options: float) -> None:
        super().__init__(**options)
        self.job, self.cost = make_validated_job(SPEC, {"x": tensor(rows, 4)})
        self.body_bytes = self.job.x.nbytes

    async def start(self) -> None:
        await super().start()
        self.exchange.acquire_permit(self.body_bytes)

    def run(self, timeout_ms: float | None = None) -> asyncio.Task:
        """Compute the job in a task, as a route does."""
        return asyncio.ensure_future(self._run(timeout_ms))

    async def _run(self, timeout_ms: float | None) -> NormResult:
        # The frame holds it, as that of a route does.
        job = self.job
        self.exchange.charge_memory(job, self.cost, self.body_bytes)
        self.exchange.submit_job(job, timeout_ms)
        return await self.exchange.await_result()


def played(body, **options) -> None:
    async def run() -> None:
        asked = Asked(**options)
        await asked.start()
        await body(asked)
        assert asked.exchange.response_sender.on_disconnect is None

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_job_is_computed_and_its_record_says_where_it_is():
    async def body(asked):
        running, record = asked.run(), asked.exchange.record
        await turn()
        assert (record.dtype, record.rows, record.current_stage) == ("float32", 2, "queue")
        assert record.stage_seconds["parse"] >= 0
        assert asked.limits.request_count == 1
        asked.scene.executor.finish()
        result = await running
        assert result.tensors["y"] is asked.job.x

    played(body)


def test_results_are_charged_before_they_are_computed():
    async def body(asked):
        running = asked.run()
        await turn()
        assert asked.limits.used_bytes >= 2 * asked.body_bytes
        asked.scene.executor.finish()
        await running
        # Until the response has been sent.
        assert asked.limits.used_bytes >= 2 * asked.body_bytes

    played(body, rows=2**14)


def test_what_takes_more_than_there_may_be_is_not_computed():
    async def body(asked):
        with pytest.raises(TooLargeError):
            await asked.run()
        assert not asked.scene.executor.running

    played(body, rows=2**14, max_bytes=2**18 + 1)


@pytest.mark.parametrize(("default", "given"), [(20, None), (20_000, 20.0)])
def test_the_deadline_is_the_requests_or_the_servers(default, given):
    async def body(asked):
        first = asked.scene.submit(make_validated_job(SPEC, {"x": tensor(1, 4)})[0])
        await turn()
        with pytest.raises(DeadlineExceededError):
            await asked.run(given)
        asked.scene.executor.finish()
        await first
        assert not asked.scene.executor.running

    played(body, timeout_ms=default)


def test_time_that_the_body_took_counts():
    async def body(asked):
        asked.exchange.record.began_at = time.perf_counter() - 30
        with pytest.raises(DeadlineExceededError):
            await asked.run()

    played(body)


def test_who_leaves_in_time_costs_no_launch():
    async def body(asked):
        first = asked.scene.submit(make_validated_job(SPEC, {"x": tensor(1, 8)})[0])
        await turn()
        running = asked.run()
        await turn()
        asked.exchange.response_sender.on_disconnect()
        with pytest.raises(ClientLeftError):
            await running
        asked.scene.executor.finish()
        await first
        assert not asked.scene.executor.running

    played(body)


def test_who_leaves_while_the_device_works_keeps_the_permit_until_it_is_done():
    async def body(asked):
        running = asked.run()
        await turn()
        asked.exchange.response_sender.on_disconnect()
        await turn()
        assert not running.done()
        assert asked.limits.request_count == 1
        asked.scene.executor.finish()
        await running

    played(body)


def test_an_error_of_the_device_is_the_callers():
    async def body(asked):
        running = asked.run()
        await turn()
        asked.scene.executor.finish(DeviceOutOfMemoryError("dry"))
        with pytest.raises(DeviceOutOfMemoryError):
            await running

    played(body)


def test_a_task_that_is_cancelled_takes_its_job_out_of_the_queue():
    async def body(asked):
        first = asked.scene.submit(make_validated_job(SPEC, {"x": tensor(1, 8)})[0])
        await turn()
        running = asked.run()
        await turn()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asked.exchange.job is None
        asked.scene.executor.finish()
        await first
        assert not asked.scene.executor.running

    played(body)


def test_a_job_that_runs_is_ended_once_after_its_task_is_cancelled():
    async def body(asked):
        running = asked.run()
        await turn()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asked.exchange.job is asked.job
        asked.scene.executor.finish()
        await turn()
        assert asked.exchange.job is None

    played(body)


class Memory(bytearray):
    """A body's memory, which may be referred to weakly."""


def test_a_body_does_not_wait_for_the_collector_after_an_error():
    async def body(asked):
        memory = Memory(32)
        held = weakref.ref(memory)
        asked.job, _ = make_validated_job(SPEC, {"x": replace(tensor(2, 4), data=memoryview(memory))})
        del memory
        running = asked.run()
        await turn()
        asked.job = None
        asked.scene.executor.finish(DeviceOutOfMemoryError("dry"))
        with pytest.raises(DeviceOutOfMemoryError):
            await running
        del running
        await turn()
        assert held() is None

    with without_collector():
        played(body)
