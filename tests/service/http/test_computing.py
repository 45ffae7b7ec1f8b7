"""An operation over HTTP between its body and its response: its memory, its deadline, and a client that leaves."""

import asyncio
import time

import pytest
from normserve.admission.callers import Caller
from normserve.admission.permits import Limits
from normserve.engine.progress import Progress
from normserve.errors import (
    ClientLeftError,
    DeadlineExceededError,
    DeviceOutOfMemoryError,
    NotReadyError,
    TooLargeError,
)
from normserve.http.body import BodyReader
from normserve.http.computing import Computing, note_result
from normserve.http.exchange import Exchange
from normserve.http.transport import Reception
from normserve.http.transport.asgi import PlainSending
from normserve.jobs.job import NormResult, NormSpec, Op, Pass
from normserve.jobs.validation import costed_job
from normserve.memory.slabs import SlabPool
from normserve.metrics.requests import RequestRecord
from normserve.requests.admission import Admission
from normserve.requests.lifecycle import RequestServices

from tests.service.engine.fake_engine import Scene, turn
from tests.service.jobs.fake_jobs import tensor


class Asked:
    """One request, and what computes it."""

    def __init__(self, *, rows: int = 2, max_bytes: int = 2**30, timeout_ms: float = 20_000) -> None:
        self.scene = Scene()
        self.limits = Limits(max_requests=4, max_bytes=2**30)
        engine = self.scene.engine
        bodies = BodyReader(SlabPool(max_idle_bytes=0), 2**20, pause_s=5, total_s=5)
        self.computing = Computing(engine, bodies)
        reception = Reception(0, bytearray)
        reception.complete()
        self.progress, admission = Progress(), Admission(engine, max_bytes)
        services = RequestServices(engine, self.limits, admission, self.progress, self.scene.metrics, timeout_ms)
        scope = {"path": "/", "state": {"reception": reception, "sending": PlainSending(None)}}
        record = RequestRecord(stages={"recv": 0.0})
        self.exchange = Exchange(services, "id", {}, Caller("somebody"), record, scope, lambda scope: "/")
        spec = NormSpec(Op.LAYER_NORM, Pass.FORWARD, eps=1e-5)
        self.job, self.cost = costed_job(spec, {"x": tensor(rows, 4)})
        self.body_bytes = self.job.x.nbytes

    async def start(self) -> None:
        await self.scene.engine.start()
        self.scene.engine.open()
        self.exchange.permit = self.limits.acquire(self.body_bytes)

    def run(self, timeout_ms: float | None = None) -> asyncio.Task:
        running = self.computing.run(self.exchange, self.job, self.cost, self.body_bytes, timeout_ms)
        return asyncio.ensure_future(running)


def played(body, **options) -> None:
    async def run() -> None:
        asked = Asked(**options)
        await asked.start()
        await body(asked)
        assert asked.exchange.sending.on_departure is None

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_job_is_computed_and_its_record_says_where_it_is():
    async def body(asked):
        running, record = asked.run(), asked.exchange.record
        await turn()
        assert (record.dtype, record.rows, record.waiting_in) == ("float32", 2, "queue")
        assert record.stages["parse"] >= 0
        assert asked.limits.requests == 1
        asked.scene.executor.finish()
        result = await running
        assert result.tensors["y"] is asked.job.x

    played(body)


def test_results_are_charged_before_they_are_computed():
    async def body(asked):
        running = asked.run()
        await turn()
        assert asked.limits.bytes >= 2 * asked.body_bytes
        asked.scene.executor.finish()
        await running
        # Until the response has been sent.
        assert asked.limits.bytes >= 2 * asked.body_bytes

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
        first = asked.scene.submit(costed_job(asked.job.spec, {"x": tensor(1, 4)})[0])
        await turn()
        with pytest.raises(DeadlineExceededError):
            await asked.run(given)
        asked.scene.executor.finish()
        await first
        assert not asked.scene.executor.running

    played(body, timeout_ms=default)


def test_time_that_the_body_took_counts():
    async def body(asked):
        asked.exchange.record.began = time.perf_counter() - 30
        with pytest.raises(DeadlineExceededError):
            await asked.run()

    played(body)


def test_who_leaves_in_time_costs_no_launch():
    async def body(asked):
        first = asked.scene.submit(costed_job(asked.job.spec, {"x": tensor(1, 8)})[0])
        await turn()
        running = asked.run()
        await turn()
        asked.exchange.sending.on_departure()
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
        asked.exchange.sending.on_departure()
        await turn()
        assert not running.done()
        assert asked.limits.requests == 1
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


def test_no_body_is_received_before_the_server_is_ready():
    async def run():
        asked = Asked()
        with pytest.raises(NotReadyError):
            await asked.computing.receive(asked.exchange)
        assert asked.limits.requests == 0
        assert asked.exchange.permit is None
        assert asked.progress.is_idle

    asyncio.run(run())


def test_work_begins_once_the_body_is_whole():
    async def body(asked):
        asked.exchange.permit.release()
        received = await asked.computing.receive(asked.exchange)
        assert bytes(received) == b""
        record = asked.exchange.record
        assert (record.stages["recv"], record.waiting_in) == (asked.exchange.reception.seconds, "parse")
        assert not asked.progress.is_idle
        assert asked.limits.requests == 1

    played(body)


def test_what_a_result_says_is_what_its_response_says():
    record = RequestRecord(stages={"recv": 0.25})
    measured = note_result(record, NormResult({}, 0.5, 1.0, 2.0, 4.0, 10, 30, 3, 0.0), time.perf_counter())
    assert measured == (0.25, 0.5, 1.0, 2.0, 4.0, 10, 15.0, 3)
    assert {stage: record.stages[stage] for stage in ("queue", "copy_in", "kernel", "copy_out")} == {
        "queue": 0.5,
        "copy_in": 1.0,
        "kernel": 2.0,
        "copy_out": 4.0,
    }
    assert record.stages["serialize"] >= 0
    assert record.waiting_in == "send"
