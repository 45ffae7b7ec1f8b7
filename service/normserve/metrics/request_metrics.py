"""The metrics of a request, which are updated at its end."""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from normserve.admission import revocation
from normserve.errors.problems import STATUSES
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

STAGES = (
    *("recv", "relay_in", "parse", "queue", "copy_in", "kernel", "copy_out"),
    *("resume", "serialize", "relay_out", "send"),
)
"""The stages of an operation, in the order in which it passes them.  Only one behind a front end is relayed."""

#: Routes that machines ask on their own, again and again.
PROBES = frozenset(("livez", "readyz", "metrics"))

# Up to the first beyond five minutes, the default of `--transfer-timeout-s`.
_DURATION_BUCKETS = tuple(1e-5 * 2**k for k in range(26))
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
        ended_at: when the operating system took the last byte of its response; 0 if that never happened.
        duration_s: from `began_at` to its end.
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
    ended_at: float = 0.0
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
        launch_ended_at = result.started_at + result.copy_in_s + result.kernel_s + result.copy_out_s
        self.stage_seconds["resume"] = max(0.0, response_began_at - launch_ended_at)
        self.launched_at, self.launch_bytes = result.started_at, result.launch_bytes
        self.kernel_bytes, self.batch_size = result.kernel_bytes, result.batch_size
        self.response_began_at = response_began_at

    def record_received(self, receive_s: float, *, is_relayed: bool) -> None:
        """Record that the body was received completely, and that its parsing begins.

        Args:
            receive_s: seconds from the end of the header to the last byte of the body.
            is_relayed: whether another process received it, and this one has only now been told.
        """
        self.stage_seconds["recv"] = receive_s
        if is_relayed:
            self.stage_seconds["relay_in"] = max(0.0, time.perf_counter() - self.began_at - receive_s)
        self.current_stage = "parse"

    def record_parsed(self) -> None:
        """Record that the request is parsed and waits for the device."""
        relay_s = self.stage_seconds.get("relay_in", 0.0)
        received_at = self.began_at + self.stage_seconds["recv"] + relay_s
        self.stage_seconds["parse"] = time.perf_counter() - received_at
        self.current_stage = "queue"

    def record_sent(self, send_s: float, ended_at: float, *, is_relayed: bool) -> None:
        """Record the transmission of the response, whose stages only an operation with a result has.

        Args:
            send_s: seconds from its first byte to its last one.
            ended_at: when the operating system took the last one, by `time.perf_counter`; 0 if it did not.
            is_relayed: whether another process has the client's connection.
        """
        self.ended_at = ended_at
        if "kernel" in self.stage_seconds:
            if is_relayed and ended_at:
                serialized_at = self.response_began_at + self.stage_seconds["serialize"]
                self.stage_seconds["relay_out"] = max(0.0, ended_at - send_s - serialized_at)
            self.stage_seconds["send"] = send_s


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
            (*labels, "code_class"),
            _DURATION_BUCKETS,
        )
        self._stage_duration = make.add_histogram(
            "stage_duration_seconds", "Time that operations spent in each stage.", ("stage",), _DURATION_BUCKETS
        )
        self._bandwidth = make.add_histogram(
            "request_bandwidth_bytes_per_second",
            "Request bandwidth: bytes of one operation's request and response, divided by its duration.",
            labels,
            _BANDWIDTH_BUCKETS,
        )
        self._body_bytes = make.add_counter(
            "body_bytes_total",
            "Bytes of request and response bodies; over shared memory, of tensors. The rate of those of operations "
            "is the served throughput.",
            (*labels, "direction"),
        )
        self._rejected = make.add_counter(
            "rejected_total",
            "Requests rejected, by reason and class of status, without probes and scrapes.",
            ("reason", "code_class"),
        )
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
        statuses = {error.code: status for error, status in STATUSES.items()}
        for reason in REJECTIONS:
            self._rejected(reason, classify_status(statuses[reason]))
        for reason in revocation.REASONS:
            self.revoked_bodies(reason)
        for reason in REFUSED_CONNECTIONS:
            self.refused_connections(reason)
        for cause in statuses:
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
        record.duration_s = (record.ended_at or time.perf_counter()) - record.began_at
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
        code_class = classify_status(record.status)
        self._total(record.op, record.direction, record.dtype, record.transport, str(record.status)).inc(count)
        self._duration(*labels, code_class).observe_many(times.durations_s)
        self._body_bytes(*labels, "in").inc(sum(received))
        self._body_bytes(*labels, "out").inc(sum(sent))
        for stage, seconds in times.stage_seconds.items():
            self._stage_duration(stage).observe_many(seconds)
        if record.key_name is not None:
            self._key_requests(record.key_name, str(record.status)).inc(count)
            self._key_bytes(record.key_name, "in").inc(sum(received))
            self._key_bytes(record.key_name, "out").inc(sum(sent))
        if record.error_code is not None:
            self._errors(record.error_code).inc(count)
        if record.error_code in REJECTIONS and record.op not in PROBES:
            self._rejected(record.error_code, code_class).inc(count)
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
        duration = self._duration(record.op, record.direction, record.transport, classify_status(record.status))
        duration.attach_exemplar(Exemplar(record.trace_id, record.duration_s, observed))
        for stage, seconds in record.stage_seconds.items():
            self._stage_duration(stage).attach_exemplar(Exemplar(record.trace_id, seconds, observed))


def classify_status(status: int) -> str:
    """Return the class of an HTTP status, as in `2xx`."""
    return f"{status // 100}xx"
