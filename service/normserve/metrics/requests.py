"""The metrics of a request, which are updated at its end."""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from normserve.admission import revocation
from normserve.errors import NormserveError
from normserve.jobs.job import NormResult
from normserve.metrics.instruments import Exemplar
from normserve.metrics.registrar import COUNTED_AT_ONCE, KERNEL_LABELS, MetricRegistry

UNMATCHED = "__unmatched__"
NONE = "none"

#: The status under which a request is counted whose client was gone before its answer.
CLIENT_LEFT = 499

REFUSED_CONNECTIONS = ("max_connections", "max_connections_per_address", "local_connections")
REJECTIONS = ("overloaded", "rate_limited", "draining", "not_ready", "too_large", "deadline_exceeded")

_DURATION_BUCKETS = tuple(1e-5 * 2**k for k in range(22))
_BANDWIDTH_BUCKETS = tuple(10 ** (6 + k / 4) for k in range(21))


@dataclass(slots=True)
class RequestRecord:
    """What one request turned out to be; filled in while it is processed, observed once at its end.

    Attributes:
        op: an operation, the name of another route, or `UNMATCHED`.
        direction: "forward", "backward" or "none".
        status: of the response; 499 when the client left before it was complete.
        error: code of the error that answered it.
        key: the name of the API key that it came with, None without one that is known.
        stages: seconds by stage, of those it went through.
        waiting_in: the stage that it is in, should it be cut off.
        received, sent: bytes of bodies.
        began: its header was complete, by `time.perf_counter`.
        seconds: from then to its end.
        rows: of x, of an operation that was admitted.
        launched, launch_bytes, kernel_bytes, batch_size: of its result, as `NormResult` has them.
        answering: its answer began to be written, by `time.perf_counter`.
        span: of its trace; opaque here.  None until it is decided whether it is traced.
        trace_id: of its trace, if it is traced.
    """

    op: str = UNMATCHED
    direction: str = NONE
    dtype: str = NONE
    transport: str = "tcp"
    status: int = 0
    error: str | None = None
    key: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    waiting_in: str = "recv"
    received: int = 0
    sent: int = 0
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    rows: int = 0
    launched: float = 0.0
    launch_bytes: int = 0
    kernel_bytes: int = 0
    batch_size: int = 0
    answering: float = 0.0
    span: object = None
    trace_id: str | None = None

    def note_result(self, result: NormResult, answering: float) -> None:
        """Its result is there; `answering` is when the answer began to be written."""
        self.stages["queue"] = result.queue_s
        self.stages["copy_in"] = result.copy_in_s
        self.stages["kernel"] = result.kernel_s
        self.stages["copy_out"] = result.copy_out_s
        self.launched, self.launch_bytes = result.started, result.launch_bytes
        self.kernel_bytes, self.batch_size = result.kernel_bytes, result.batch_size
        self.answering = answering


class RequestTimes(NamedTuple):
    """What requests took that are otherwise alike.

    Attributes:
        stages: by stage the seconds of each request.
        seconds: of each, from its header to its end.
    """

    stages: Mapping[str, Sequence[float]]
    seconds: Sequence[float]


class RequestMetrics:
    """What is known of a request at its end."""

    def __init__(self, make: MetricRegistry) -> None:
        labels = ("op", "pass", "transport")
        self._total = make.counter(
            "requests_total",
            "Requests answered, by operation and status.",
            (*KERNEL_LABELS, "transport", "code"),
        )
        self._duration = make.histogram(
            "request_duration_seconds",
            "From a request's header to the last byte of its response.",
            labels,
            _DURATION_BUCKETS,
        )
        self._stage_duration = make.histogram(
            "stage_duration_seconds", "Time that operations spent in each stage.", ("stage",), _DURATION_BUCKETS
        )
        self._bandwidth = make.histogram(
            "request_bandwidth_bytes_per_second",
            "Bytes of an operation's request and response over its wall time.",
            labels,
            _BANDWIDTH_BUCKETS,
        )
        self._rejected = make.counter("rejected_total", "Requests rejected, by reason.", ("reason",))
        self.revoked = make.counter(
            "revoked_total", "Request bodies aborted in favour of other requests, by reason.", ("reason",)
        )
        self.refused_connections = make.counter(
            "connections_refused_total", "Connections refused because a limit was reached, by limit.", ("reason",)
        )
        self._errors = make.counter("errors_total", "Requests answered with an error, by cause.", ("cause",))
        self.cancelled = make.counter(
            "cancelled_total", "Requests whose client disconnected, by the stage they were in.", ("stage",)
        )
        self._key_requests = make.counter(
            "key_requests_total", "Authenticated requests, by the name of their API key.", ("key", "code")
        )
        self._key_bytes = make.counter(
            "key_bytes_total",
            "Bytes of the request and response bodies of authenticated requests.",
            ("key", "direction"),
        )
        self._ended: list[RequestRecord] = []
        # A rate sees the step from 0 to 1, and none from nothing to 1.
        for reason in REJECTIONS:
            self._rejected(reason)
        for reason in revocation.REASONS:
            self.revoked(reason)
        for reason in REFUSED_CONNECTIONS:
            self.refused_connections(reason)
        for cause in _list_error_codes(NormserveError):
            self._errors(cause)
        for stage in ("recv", "parse", "queue", "send"):
            self.cancelled(stage)

    def announce_keys(self, names: Iterable[str]) -> None:
        """Show these keys' series before their first request; those of keys that are gone stay."""
        for name in names:
            self._key_requests(name, "200")
            self._key_bytes(name, "in")
            self._key_bytes(name, "out")

    def observe(self, record: RequestRecord) -> None:
        record.seconds = time.perf_counter() - record.began
        self._ended.append(record)
        if len(self._ended) >= COUNTED_AT_ONCE:
            self.settle()

    def observe_alike(self, record: RequestRecord, times: RequestTimes) -> None:
        """Count requests that are like this one but for their times."""
        count = len(times.seconds)
        self._count(record, times, [record.received] * count, [record.sent] * count)

    def settle(self) -> None:
        """Count what has ended since the last time."""
        alike: dict[Hashable, list[RequestRecord]] = {}
        for record in self._ended:
            labels = (record.op, record.direction, record.dtype, record.transport, record.status)
            alike.setdefault((labels, record.error, record.key, record.waiting_in, *record.stages), []).append(
                record
            )
        self._ended.clear()
        for records in alike.values():
            first = records[0]
            stages = {stage: [record.stages[stage] for record in records] for stage in first.stages}
            times = RequestTimes(stages, [record.seconds for record in records])
            received, sent = [record.received for record in records], [record.sent for record in records]
            self._count(first, times, received, sent)
            for record in [record for record in records if record.trace_id is not None]:
                self._show(record)

    def _count(
        self, record: RequestRecord, times: RequestTimes, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Count requests of the same labels, that went through the same stages."""
        count = len(times.seconds)
        labels = (record.op, record.direction, record.transport)
        self._total(record.op, record.direction, record.dtype, record.transport, str(record.status)).inc(count)
        self._duration(*labels).observe_all(times.seconds)
        for stage, seconds in times.stages.items():
            self._stage_duration(stage).observe_all(seconds)
        if record.key is not None:
            self._key_requests(record.key, str(record.status)).inc(count)
            self._key_bytes(record.key, "in").inc(sum(received))
            self._key_bytes(record.key, "out").inc(sum(sent))
        if record.error is not None:
            self._errors(record.error).inc(count)
        if record.error in REJECTIONS:
            self._rejected(record.error).inc(count)
        if record.status == CLIENT_LEFT:
            self.cancelled(record.waiting_in).inc(count)
        elif record.status < 300 and "kernel" in times.stages:
            bodies = zip(received, sent, times.seconds, strict=True)
            self._bandwidth(*labels).observe_all([(came + went) / seconds for came, went, seconds in bodies])

    def _show(self, record: RequestRecord) -> None:
        """Attach a traced request to the buckets that it was counted in."""
        assert record.trace_id is not None
        observed = time.time() - (time.perf_counter() - record.began - record.seconds)
        duration = self._duration(record.op, record.direction, record.transport)
        duration.show(Exemplar(record.trace_id, record.seconds, observed))
        for stage, seconds in record.stages.items():
            self._stage_duration(stage).show(Exemplar(record.trace_id, seconds, observed))


def _list_error_codes(error: type[NormserveError]) -> set[str]:
    """The codes of an error and of everything below it."""
    return {error.code}.union(*(_list_error_codes(each) for each in error.__subclasses__()))
