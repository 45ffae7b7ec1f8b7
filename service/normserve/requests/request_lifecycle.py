"""The lifecycle of a request, from its permit to its line in the access log, for all transports.

The access log, with the logger `normserve.access`, has one line for each completed request.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.permits import AdmissionBudget, Permit
from normserve.engine.engine import Engine
from normserve.engine.progress import CompletionTracker
from normserve.errors import NormserveError
from normserve.errors.problems import convert_unexpected_error, get_status
from normserve.jobs.job import NormJob, NormResult
from normserve.jobs.memory_cost import MemoryCost
from normserve.logs import failures
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import CLIENT_LEFT, PROBES, RequestRecord
from normserve.requests.memory_admission import MemoryAdmission
from normserve.traces.parent_span import make_log_fields

if TYPE_CHECKING:
    # It imports OpenTelemetry, which is installed only where traces are used.
    from normserve.traces.request_tracer import Attributes, RequestTracer

_access_log = logging.getLogger("normserve.access")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestServices:
    """The objects that all requests of the process share, such as the engine, the budget and the metrics.

    Attributes:
        request_progress: counts the requests that have been received completely and have no response yet.
        timeout_ms: default limit of the time from a request's arrival to its start on the device.
        tracer: None if requests are not traced.
        is_logged: whether the access log has a line for each request.
        logs_probes: whether it has one for probes and scrapes, too.
    """

    engine: Engine
    admission_budget: AdmissionBudget
    memory_admission: MemoryAdmission
    request_progress: CompletionTracker
    metrics: Metrics
    timeout_ms: float
    tracer: "RequestTracer | None" = None
    is_logged: bool = False
    logs_probes: bool = True


class RequestLifecycle(ABC):
    """One request of any transport, with the steps from its permit to its response, metrics and log line.

    A transport's subclass sends the result or the error of the job in `conclude_job`, and calls `finish_request`
    once the response has been sent or never will be.

    Attributes:
        request_id: the client's own, if it sent a valid one.
        headers: the request's headers by lower-case name; without HTTP those of its trace.
        client_identity: the client.
        record: the values for the metrics.
        permit: None until the request is admitted; released by `finish_request` at the latest.
        job: set while the engine has it.
        is_traced: whether the request may have a span.
    """

    is_traced = True
    permit: Permit | None = None
    job: NormJob | None = None
    _is_processing = False

    def __init__(
        self,
        services: RequestServices,
        request_id: str,
        headers: Mapping[bytes, bytes],
        caller: ClientIdentity,
        record: RequestRecord,
    ) -> None:
        self.services = services
        self.request_id = request_id
        self.headers = headers
        self.client_identity = caller
        self.record = record

    @abstractmethod
    def conclude_job(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        """Send the response for the job's result or error.  The engine's callback calls this when the job has
        ended, always after `submit_job` has returned.
        """

    @abstractmethod
    def describe_span(self) -> "tuple[str, Attributes]":
        """Return the name and the attributes that the transport gives the request's span."""

    @abstractmethod
    def describe_log_target(self) -> tuple[str, str]:
        """Return the method and the path by which the access log names the request."""

    @property
    def log_fields(self) -> dict[str, str]:
        """The log fields that identify the request: its id, and its trace if it has one."""
        return make_log_fields(self.request_id, self.record.trace_id, self.headers)

    def acquire_permit(self, nbytes: int) -> Permit:
        """Reserve `nbytes` in the admission budget for this request; keep and return the permit.

        Raises:
            OverloadedError, TooLargeError: the server's budget or that of the caller's key is exceeded.
        """
        caller = self.client_identity
        self.permit = permit = self.services.admission_budget.acquire(
            nbytes, caller.tenant_name, caller.max_inflight_bytes
        )
        return permit

    def mark_in_progress(self) -> None:
        """Count the request as in progress, since it was received completely and the server owes it a response.

        The stall detector watches the requests in progress, and busy polling pauses while there are any.  A server
        that drains does not ask for them: it waits for permits.  A second call does nothing.
        """
        if not self._is_processing:
            self._is_processing = True
            self.services.request_progress.begin_work()

    def mark_processed(self) -> None:
        """Count the request as no longer in progress: its response is ready or not needed.  A second call does
        nothing.
        """
        if self._is_processing:
            self._is_processing = False
            self.services.request_progress.end_work()

    def charge_memory(self, job: NormJob, cost: MemoryCost, body_bytes: int) -> None:
        """Add the bytes of a job's results and temporaries to the permit, and end the record's parse stage.

        Args: body_bytes: bytes that the permit covers already.

        Raises:
            TooLargeError, OverloadedError: the job takes too much memory, ever or now.
        """
        record = self.record
        self.services.memory_admission.charge_results_and_temporaries(self.permit, job, cost, body_bytes)
        record.dtype, record.rows = job.x.dtype.label, job.rows
        record.record_parsed()

    def charge_body_copy(self, nbytes: int) -> None:
        """Add the bytes of a copy of the body to the request's permit.

        Raises:
            TooLargeError, OverloadedError: the copy takes too much memory, ever or now.
        """
        self.services.memory_admission.charge_body_copy(self.permit, nbytes)

    def compute_start_deadline(self, timeout_ms: float | None) -> float:
        """Return the latest time, by `time.perf_counter`, at which the job may begin to run.

        Args: timeout_ms: None for the server's default.
        """
        wait_ms = self.services.timeout_ms if timeout_ms is None else timeout_ms
        return self.record.began_at + wait_ms / 1000

    def submit_job(self, job: NormJob, timeout_ms: float | None) -> None:
        """Submit a job to the engine, after its memory was charged.  When the job has ended, `conclude_job` is
        called with its result or error.

        Args: timeout_ms: None for the server's default.

        Raises:
            DeadlineExceededError: the deadline has passed.
            NormserveError: the engine does not take the job.
        """
        self.services.engine.submit(job, self.compute_start_deadline(timeout_ms), self._on_job_end)
        self.mark_in_progress()
        self.job = job

    def cancel_job(self) -> None:
        """Cancel the job if it is queued; a running job still ends with its result."""
        if self.job is not None:
            self.services.engine.cancel(self.job)

    def log_and_convert_error(self, error: BaseException) -> NormserveError:
        """Log an error if it is the server's own fault (status 500 or unexpected); return the error to send to
        the client.
        """
        if isinstance(error, NormserveError):
            if get_status(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
                failures.log_failure(error.detail, self._make_failure_fields())
            return error
        log.error("unexpected error in a request", exc_info=error, extra={"fields": self._make_failure_fields()})
        return convert_unexpected_error(error)

    def finish_request(self, *, is_delivered: bool) -> None:
        """End the request, because its response was sent or will never be sent.

        The processing ends, the permit is released, and the request is traced, counted and logged.
        """
        services, record = self.services, self.record
        self.mark_processed()
        if self.permit is not None:
            self.permit.release()
        if not is_delivered:
            record.status = CLIENT_LEFT
        if services.tracer is not None and self.is_traced:
            services.tracer.end_span_if_sampled(record, self.headers, self.describe_span)
        services.metrics.observe_request(record)
        if services.is_logged and (services.logs_probes or record.op not in PROBES):
            log_request(*self.describe_log_target(), record, self.client_identity, self.log_fields)

    def _on_job_end(self, ended: NormResult | NormserveError) -> None:
        """Release an ended job from the engine, and call `conclude_job` with its result or error."""
        job, self.job = self.job, None
        assert job is not None
        self.services.engine.release(job)
        self.conclude_job(ended, job)

    def _make_failure_fields(self) -> dict[str, str | None]:
        """Return the log fields that identify the request and its key.  A sampled request's span begins now, so
        that the line has its trace id.
        """
        if self.services.tracer is not None and self.is_traced:
            self.services.tracer.begin_span_if_sampled(self.record, self.headers)
        return {**self.log_fields, "key": self.client_identity.key}


class CallbackRequest(RequestLifecycle):
    """A request whose response is sent directly from the engine's callback, so that no task waits for the job.

    A transport's subclass sends results and problems.
    """

    @abstractmethod
    def send_result(self, result: NormResult, job: NormJob) -> None:
        """Send the response for a job's result.  If the method raises an error, that error is sent instead."""

    @abstractmethod
    def send_problem(self, error: NormserveError) -> None:
        """Send an error response; the record already has its status and error code."""

    def respond_error(self, error: BaseException) -> None:
        """Send an error response and set the record's status and code.  An error that is the server's own fault
        is logged too.
        """
        reported_error = self.log_and_convert_error(error)
        self.record.error_code, self.record.status = reported_error.code, get_status(reported_error)
        self.send_problem(reported_error)

    def conclude_job(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        """Send the job's result or error.  If sending the result raises an error, that error is sent instead."""
        self.mark_processed()
        # Not raised: its traceback would hold this frame, and with it the job.
        if isinstance(ended, NormserveError):
            self.respond_error(ended)
            return
        try:
            self.send_result(ended, job)
        except Exception as error:
            self.respond_error(error)


def log_request(
    method: str, path: str, record: RequestRecord, caller: ClientIdentity, identifying_fields: Mapping[str, str]
) -> None:
    """Write the access log's line for a request that has ended.

    Args:
        path: a template or an operation, because clients can send any path.
        identifying_fields: the log fields that identify the request.
    """
    fields = {
        "method": method,
        "path": path,
        "status": record.status,
        "key": caller.key or "-",
        "address": caller.address,
        "received_bytes": record.received_bytes,
        "sent_bytes": record.sent_bytes,
        "ms": round(record.duration_s * 1000, 3),
        **identifying_fields,
    }
    _access_log.info("request", extra={"fields": fields})
