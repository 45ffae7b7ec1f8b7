"""A request of a transport that keeps what it is to send: permit, memory, deadline, end, failures and accounts."""

import asyncio
import logging
import time
import weakref
from dataclasses import replace

import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.admission.permits import AdmissionBudget
from normserve.engine.progress import CompletionTracker
from normserve.errors import (
    ClientLeftError,
    ConfigurationError,
    DeadlineExceededError,
    DeviceOutOfMemoryError,
    InvalidShapeError,
    OverloadedError,
    TooLargeError,
)
from normserve.jobs.job import NormSpec, Op, PassDirection
from normserve.jobs.validation import make_validated_job
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.memory_admission import MemoryAdmission
from normserve.requests.request_lifecycle import CallbackRequest, RequestServices

from tests.service.engine.fake_engine import Scene, turn
from tests.service.jobs.fake_jobs import tensor

SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5)


class Sent(CallbackRequest):
    """Keeps its response."""

    def __init__(self, services, caller=ClientIdentity("10.0.0.1")):  # noqa: B008
        record = RequestRecord(op="layer_norm", stage_seconds={"recv": 0.0})
        super().__init__(services, "an-id", {}, caller, record)
        self.results, self.problems = [], []
        self.fault = None

    def send_result(self, result, job):
        if self.fault is not None:
            raise self.fault
        self.results.append((result, job))

    def send_problem(self, error):
        self.problems.append(error)

    def describe_span(self):
        raise AssertionError("nothing is traced")

    def describe_log_target(self):
        return "MESSAGE", "layer_norm"


class Server:
    """What requests are served with; `records` are those that were counted."""

    def __init__(self, *, max_bytes=2**30, max_requests=4):
        self.scene = Scene()
        self.admission_budget = AdmissionBudget(max_requests=max_requests, max_bytes=2**30)
        self.request_progress = CompletionTracker()
        self.records = []
        metrics = self.scene.metrics
        metrics.observe_request = self.records.append
        engine = self.scene.engine
        self.services = RequestServices(
            engine,
            self.admission_budget,
            MemoryAdmission(engine, max_bytes),
            self.request_progress,
            metrics,
            timeout_ms=20_000,
        )

    def begin(self, request, *, rows=2, timeout_ms=None, x=None):
        job, cost = make_validated_job(SPEC, {"x": tensor(rows, 4) if x is None else x})
        request.acquire_permit(job.nbytes)
        request.charge_memory(job, cost, job.nbytes)
        request.submit_job(job, timeout_ms)
        return job


def played(body, **options):
    async def run():
        server = Server(**options)
        await server.scene.engine.start()
        server.scene.engine.accept_jobs()
        await body(server)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_job_is_begun_and_its_result_is_sent():
    async def body(server):
        request = Sent(server.services)
        job = server.begin(request)
        record = request.record
        assert (record.dtype, record.rows, record.current_stage) == ("float32", 2, "queue")
        assert record.stage_seconds["parse"] >= 0
        assert request.job is job
        assert not server.request_progress.is_idle
        await turn()
        server.scene.executor.finish()
        await turn()
        [(result, of)] = request.results
        assert (result.tensors["y"], of) == (job.x, job)
        assert request.job is None
        assert server.request_progress.is_idle
        # The transport releases it.
        assert server.admission_budget.request_count == 1

    played(body)


@pytest.mark.parametrize("fault", [None, InvalidShapeError("unsendable"), ValueError("unexpected")])
def test_an_error_of_the_job_or_of_its_response_is_sent_as_a_problem(fault, caplog):
    async def body(server):
        request = Sent(server.services)
        request.fault = fault
        server.begin(request)
        await turn()
        server.scene.executor.finish(DeviceOutOfMemoryError("dry") if fault is None else None)
        await turn()
        [problem] = request.problems
        code, status = {None: ("device_out_of_memory", 503)}.get(fault, (problem.code, request.record.status))
        assert (request.record.error_code, request.record.status) == (code, status)
        assert (problem is fault) == isinstance(fault, InvalidShapeError)
        assert len(caplog.records) == isinstance(fault, ValueError)
        assert not request.results

    played(body)


def test_work_is_counted_once_from_its_first_beginning_to_its_first_end():
    server = Server()
    request = Sent(server.services)
    request.mark_processed()
    assert server.request_progress.is_idle
    request.mark_in_progress()
    request.mark_in_progress()
    other = Sent(server.services)
    other.mark_in_progress()
    request.mark_processed()
    request.mark_processed()
    assert not server.request_progress.is_idle
    other.mark_processed()
    assert server.request_progress.is_idle


def test_a_received_body_is_in_the_record():
    request = Sent(Server().services)
    request.record.record_received(0.25, is_relayed=False)
    assert (request.record.stage_seconds["recv"], request.record.current_stage) == (0.25, "parse")


def test_what_waits_is_withdrawn_and_what_runs_has_its_result():
    async def body(server):
        running, waiting = Sent(server.services), Sent(server.services)
        server.begin(running)
        await turn()
        server.begin(waiting)
        await turn()
        for each in (running, waiting):
            each.cancel_job()
        await turn()
        assert [type(each) for each in waiting.problems] == [ClientLeftError]
        assert not running.problems
        waiting.cancel_job()
        server.scene.executor.finish()
        await turn()
        assert len(running.results) == 1
        assert not server.scene.executor.running

    played(body)


class Memory(bytearray):
    """A body's memory, which may be referred to weakly."""


def test_a_body_is_not_held_by_the_problem_that_was_sent():
    async def body(server):
        request, memory = Sent(server.services), Memory(32)
        held, x = weakref.ref(memory), replace(tensor(2, 4), data=memoryview(memory))
        server.begin(request, x=x)
        del memory, x
        await turn()
        assert held() is not None
        server.scene.executor.finish(DeviceOutOfMemoryError("dry"))
        await turn()
        assert request.problems
        assert held() is None

    played(body)


@pytest.mark.parametrize(("default", "given"), [(20.0, None), (20_000.0, 20.0)])
def test_the_deadline_counts_from_the_arrival(default, given):
    async def body(server):
        request = Sent(replace(server.services, timeout_ms=default))
        assert request.compute_start_deadline(given) == pytest.approx(request.record.began_at + 0.02)
        request.record.began_at = time.perf_counter() - 1
        with pytest.raises(DeadlineExceededError):
            server.begin(request, timeout_ms=given)
        assert request.job is None
        assert server.request_progress.is_idle

    played(body)


def test_memory_and_permits_have_limits():
    async def body(server):
        with pytest.raises(TooLargeError):
            server.begin(Sent(server.services), rows=2**14)
        with pytest.raises(TooLargeError):
            Sent(server.services).charge_body_copy(2**18)
        with pytest.raises(OverloadedError):
            Sent(server.services).acquire_permit(1)
        assert not server.scene.executor.running

    played(body, max_bytes=2**18 + 1, max_requests=1)


def test_a_key_has_no_more_inside_than_its_quota():
    server = Server()
    request = Sent(server.services, ClientIdentity("10.0.0.1", "batch", 10))
    with pytest.raises(TooLargeError):
        request.acquire_permit(11)
    request.acquire_permit(10)
    assert request.permit.tenant is server.admission_budget.acquire(0, "key:batch").tenant


@pytest.mark.parametrize(
    ("error", "logger", "code"),
    [
        (OverloadedError("later", 1.0), None, "overloaded"),
        (ConfigurationError("it is wrong"), "normserve.failures", "configuration"),
        (MemoryError(), "normserve.requests.request_lifecycle", "device_out_of_memory"),
        (ValueError("unexpected"), "normserve.requests.request_lifecycle", "internal"),
    ],
)
def test_errors_of_the_server_are_logged_with_whose_request_it_was(error, logger, code, caplog):
    request = Sent(Server().services, ClientIdentity("10.0.0.1", "batch"))
    request.respond_error(error)
    assert [each.code for each in request.problems] == [request.record.error_code]
    assert [record.name for record in caplog.records] == ([] if logger is None else [logger])
    for record in caplog.records:
        assert record.fields == {"request_id": "an-id", "key": "batch"}


@pytest.mark.parametrize(
    ("logs_probes", "logged"), [(True, ["layer_norm", "livez", "readyz", "metrics"]), (False, ["layer_norm"])]
)
def test_the_access_log_leaves_out_probes_if_told_to(logs_probes, logged, caplog):
    caplog.set_level(logging.INFO, "normserve.access")
    server = Server()
    for op in ("layer_norm", "livez", "readyz", "metrics"):
        request = Sent(replace(server.services, is_logged=True, logs_probes=logs_probes))
        request.record.op, request.record.status = op, len(op)
        request.finish_request(is_delivered=True)
    assert [each.fields["status"] for each in caplog.records] == list(map(len, logged))
    assert len(server.records) == 4


@pytest.mark.parametrize("is_logged", [False, True])
@pytest.mark.parametrize(("is_delivered", "status"), [(True, 200), (False, 499)])
def test_a_request_is_counted_once_and_logged_if_asked_for(is_logged, is_delivered, status, caplog):
    caplog.set_level(logging.INFO, "normserve.access")
    server = Server()
    request = Sent(replace(server.services, is_logged=is_logged))
    request.record.status = 200
    request.finish_request(is_delivered=is_delivered)
    assert server.records == [request.record]
    assert request.record.status == status
    assert [(each.fields["method"], each.fields["status"]) for each in caplog.records] == [
        ("MESSAGE", status)
    ] * is_logged
