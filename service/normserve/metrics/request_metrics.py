"""The metrics of a request, which are updated at its end."""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from normserve.admission import revocation
from normserve.errors import NormserveError
from normserve.jobs.job import NormResult
from normserve.metrics.instruments import Exemplar
from normserve.metrics.registry import COUNTED_AT_ONCE, KERNEL_LABELS, MetricRegistry

UNMATCHED = "__unmatched__"

GRPC_TRANSPORT = "grpc"
"""The `transport` of requests that the gateway of gRPC passes on."""

NONE = "none"

#: The status of requests whose client disconnected before the response.
CLIENT_LEFT = 499

REFUSED_CONNECTIONS = ("max_connections", "max_connections_per_address", "local_connections")
REJECTIONS = ("overloaded", "rate_limited", "draining", "not_ready", "too_large", "deadline_exceeded")

_DURATION_BUCKETS = tuple(1e-5 * 2**k for k in range(22))
_BANDWIDTH_BUCKETS = tuple(10 ** (6 + k / 4) for k in range(21))


@dataclass(slots=True)
class RequestRecord:
    """The data of one request for metrics, spans and logs: filled in while it is processed, and counted at its end.

    Attributes:
        op: an operation, the name of another route, or `UNMATCHED`.
        direction: "forward", "backward" or "none".
        status: of the response; 499 if the client left before it was complete.
        error_code: of the error that answered it.
        key_name: the name of the request's API key, None without a valid key.
        stage_seconds: seconds by stage, of the stages that have ended.
        current_stage: the stage that the request is in, in case it is aborted.
        received_bytes, sent_bytes: bytes of bodies.
        began_at: when its header was complete, by `time.perf_counter`.
        duration_s: from then to its end.
        rows: of x, of an operation that was admitted.
        launched_at, launch_bytes, kernel_bytes, batch_size: of its result, as in `NormResult`.
        response_began_at: when the writing of its response began, by `time.perf_counter`.
        span: of its trace; opaque here.  None until it is decided whether it is traced.
        trace_id: of its trace, if it is traced.
    """

    op: str = UNMATCHED
    direction: str = NONE
    dtype: str = NONE
    transport: str = "tcp"
    status: int = 0
    error_code: str | None = None
    key_name: str | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    current_stage: str = "recv"
    received_bytes: int = 0
    sent_bytes: int = 0
    began_at: float = field(default_factory=time.perf_counter)
    duration_s: float = 0.0
    rows: int = 0
    launched_at: float = 0.0
    launch_bytes: int = 0
    kernel_bytes: int = 0
    batch_size: int = 0
    response_began_at: float = 0.0
    span: object = None
    trace_id: str | None = None

    def record_result(self, result: NormResult, response_began_at: float) -> None:
        """Copy the durations and byte counts of the job's result into the record.

        Args: response_began_at: when the writing of the response began, by `time.perf_counter`.
        """
        self.stage_seconds["queue"] = result.queue_s
        self.stage_seconds["copy_in"] = result.copy_in_s
        self.stage_seconds["kernel"] = result.kernel_s
        self.stage_seconds["copy_out"] = result.copy_out_s
        self.launched_at, self.launch_bytes = result.started_at, result.launch_bytes
        self.kernel_bytes, self.batch_size = result.kernel_bytes, result.batch_size
        self.response_began_at = response_began_at


class RequestTimes(NamedTuple):
    """The durations of several requests with equal labels and stages, one value for each request.

    Attributes:
        stage_seconds: seconds of each request, by stage.
        durations_s: of each, from its header to its end.
    """

    stage_seconds: Mapping[str, Sequence[float]]
    durations_s: Sequence[float]


class RequestMetrics:
    """The metrics of requests, connections and API keys."""

    def __init__(self, make: MetricRegistry) -> None:
        labels = ("op", "pass", "transport")
        self._total = make.add_counter(
            "requests_total",
            "Requests answered, by operation and status.",
            (*KERNEL_LABELS, "transport", "code"),
        )
        self._duration = make.add_histogram(
            "request_duration_seconds",
            "From a request's header to the last byte of its response.",
            labels,
            _DURATION_BUCKETS,
        )
        self._stage_duration = make.add_histogram(
            "stage_duration_seconds", "Time that operations spent in each stage.", ("stage",), _DURATION_BUCKETS
        )
        self._bandwidth = make.add_histogram(
            "request_bandwidth_bytes_per_second",
            "Bytes of an operation's request and response over its wall time.",
            labels,
            _BANDWIDTH_BUCKETS,
        )
        self._rejected = make.add_counter("rejected_total", "Requests rejected, by reason.", ("reason",))
        self.revoked_bodies = make.add_counter(
            "revoked_total", "Request bodies aborted in favour of other requests, by reason.", ("reason",)
        )
        self.refused_connections = make.add_counter(
            "connections_refused_total", "Connections refused because a limit was reached, by limit.", ("reason",)
        )
        self._errors = make.add_counter("errors_total", "Requests answered with an error, by cause.", ("cause",))
        self.disconnects = make.add_counter(
            "cancelled_total", "Requests whose client disconnected, by the stage they were in.", ("stage",)
        )
        self._key_requests = make.add_counter(
            "key_requests_total", "Authenticated requests, by the name of their API key.", ("key", "code")
        )
        self._key_bytes = make.add_counter(
            "key_bytes_total",
            "Bytes of the request and response bodies of authenticated requests.",
            ("key", "direction"),
        )
        self._recorded: list[RequestRecord] = []
        # A rate sees the step from 0 to 1, and none from nothing to 1.
        for reason in REJECTIONS:
            self._rejected(reason)
        for reason in revocation.REASONS:
            self.revoked_bodies(reason)
        for reason in REFUSED_CONNECTIONS:
            self.refused_connections(reason)
        for cause in _list_error_codes(NormserveError):
            self._errors(cause)
        for stage in ("recv", "parse", "queue", "send"):
            self.disconnects(stage)

    def add_key_series(self, names: Iterable[str]) -> None:
        """Create the metric series of these API keys with the value 0, before their first request.

        Series of removed keys stay.
        """
        for name in names:
            self._key_requests(name, "200")
            self._key_bytes(name, "in")
            self._key_bytes(name, "out")

    def observe_request(self, record: RequestRecord) -> None:
        """Record a request that ends now.  The metrics are updated here once enough requests are recorded, or by
        `flush`.
        """
        record.duration_s = time.perf_counter() - record.began_at
        self._recorded.append(record)
        if len(self._recorded) >= COUNTED_AT_ONCE:
            self.flush()

    def observe_replays(self, record: RequestRecord, times: RequestTimes) -> None:
        """Count requests that differ from this one only in their durations."""
        count = len(times.durations_s)
        self._count_requests(record, times, [record.received_bytes] * count, [record.sent_bytes] * count)

    def flush(self) -> None:
        """Update the metrics for the requests that were recorded since the last call."""
        alike: dict[Hashable, list[RequestRecord]] = {}
        for record in self._recorded:
            labels = (record.op, record.direction, record.dtype, record.transport, record.status)
            alike.setdefault(
                (labels, record.error_code, record.key_name, record.current_stage, *record.stage_seconds), []
            ).append(record)
        self._recorded.clear()
        for records in alike.values():
            first = records[0]
            stages = {stage: [record.stage_seconds[stage] for record in records] for stage in first.stage_seconds}
            times = RequestTimes(stages, [record.duration_s for record in records])
            received, sent = (
                [record.received_bytes for record in records],
                [record.sent_bytes for record in records],
            )
            self._count_requests(first, times, received, sent)
            for record in [record for record in records if record.trace_id is not None]:
                self._attach_exemplars(record)

    def _count_requests(
        self, record: RequestRecord, times: RequestTimes, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Update the metrics for requests that have equal labels and stages.

        Args:
            record: of any of them.
            received, sent: the bytes of each body.
        """
        count = len(times.durations_s)
        labels = (record.op, record.direction, record.transport)
        self._total(record.op, record.direction, record.dtype, record.transport, str(record.status)).inc(count)
        self._duration(*labels).observe_many(times.durations_s)
        for stage, seconds in times.stage_seconds.items():
            self._stage_duration(stage).observe_many(seconds)
        if record.key_name is not None:
            self._key_requests(record.key_name, str(record.status)).inc(count)
            self._key_bytes(record.key_name, "in").inc(sum(received))
            self._key_bytes(record.key_name, "out").inc(sum(sent))
        if record.error_code is not None:
            self._errors(record.error_code).inc(count)
        if record.error_code in REJECTIONS:
            self._rejected(record.error_code).inc(count)
        if record.status == CLIENT_LEFT:
            self.disconnects(record.current_stage).inc(count)
        elif record.status < 300 and "kernel" in times.stage_seconds:
            bodies = zip(received, sent, times.durations_s, strict=True)
            self._bandwidth(*labels).observe_many(
                [(in_bytes + out_bytes) / seconds for in_bytes, out_bytes, seconds in bodies]
            )

    def _attach_exemplars(self, record: RequestRecord) -> None:
        """Attach a traced request as an exemplar to the histogram buckets in which it was counted."""
        assert record.trace_id is not None
        observed = time.time() - (time.perf_counter() - record.began_at - record.duration_s)
        duration = self._duration(record.op, record.direction, record.transport)
        duration.attach_exemplar(Exemplar(record.trace_id, record.duration_s, observed))
        for stage, seconds in record.stage_seconds.items():
            self._stage_duration(stage).attach_exemplar(Exemplar(record.trace_id, seconds, observed))


def _list_error_codes(error: type[NormserveError]) -> set[str]:
    """List the codes of an error and of all its subclasses."""
    return {error.code}.union(*(_list_error_codes(each) for each in error.__subclasses__()))
