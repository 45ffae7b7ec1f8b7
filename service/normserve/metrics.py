"""Every metric of the server, and the one place that increments them.

Units are base units, label sets are closed: never a shape, an id, a layer's name, a raw path or anything else
that a client chose.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from normserve import __version__
from normserve.device import DeviceInfo
from normserve.exposition import Counters, Histograms
from normserve.instruments import Counter, Family, Histogram
from normserve.jobs import Batch, Execution

UNMATCHED = "__unmatched__"
NONE = "none"

#: The status under which a request is counted whose client was gone before its answer.
CLIENT_LEFT = 499

REJECTIONS = ("overloaded", "draining", "not_ready", "too_large", "deadline_exceeded")

_KERNEL_LABELS = ("op", "pass", "dtype")
_DURATION_BUCKETS = tuple(1e-5 * 2**k for k in range(22))
_KERNEL_BANDWIDTH_BUCKETS = tuple(1e9 * 2**k for k in range(14))
_REQUEST_BANDWIDTH_BUCKETS = tuple(10 ** (6 + k / 4) for k in range(21))
_BATCH_REQUESTS_BUCKETS = tuple(float(2**k) for k in range(9))
_BATCH_BYTES_BUCKETS = tuple(float(4**k * 256) for k in range(13))


@dataclass(slots=True)
class RequestRecord:
    """What one request turned out to be; filled in as it walks, observed once at its end.

    Attributes:
        op: an operation, the name of another route, or `UNMATCHED`.
        direction: "forward", "backward" or "none".
        status: of the response; 499 when the client left before it was complete.
        error: code of the error that answered it.
        stages: seconds by stage, of those it went through.
        waiting_in: the stage that it is in, should it be cut off.
        received, sent: bytes of bodies.
    """

    op: str = UNMATCHED
    direction: str = NONE
    dtype: str = NONE
    transport: str = "tcp"
    status: int = 0
    error: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    waiting_in: str = "recv"
    received: int = 0
    sent: int = 0
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as its documentation names it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str


class _DeviceMemory(Collector):
    """Device memory, asked for when somebody scrapes."""

    described = Described(
        "normserve_device_memory_bytes", "gauge", ("kind",), "Memory of the device, by kind of use."
    )

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily(self.described.name, self.described.doc, labels=self.described.labels)
        for kind, nbytes in self.read().items():
            family.add_metric([kind], nbytes)
        return [family]


class _Registrar:
    """Makes metrics in one registry and keeps their descriptions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.catalogue: list[Described] = []

    def counter(self, name: str, doc: str, labels: Sequence[str]) -> Family[Counter]:
        family = Family(self._described("counter", name, doc, labels), doc, labels, Counter)
        self._registry.register(Counters(family))
        return family

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._described("gauge", name, doc, labels), doc, labels, registry=self._registry)

    def histogram(self, name: str, doc: str, labels: Sequence[str], buckets: Sequence[float]) -> Family[Histogram]:
        name = self._described("histogram", name, doc, labels)
        family = Family(name, doc, labels, functools.partial(Histogram, buckets))
        self._registry.register(Histograms(family))
        return family

    def collector(self, collector: _DeviceMemory) -> None:
        self._registry.register(collector)
        self.catalogue.append(collector.described)

    def _described(self, kind: str, name: str, doc: str, labels: Sequence[str]) -> str:
        described = Described(f"normserve_{name}", kind, tuple(labels), doc)
        self.catalogue.append(described)
        return described.name


class _Requests:
    """What is known of a request at its end."""

    def __init__(self, make: _Registrar) -> None:
        labels = ("op", "pass", "transport")
        self._total = make.counter(
            "requests_total",
            "Requests answered, by what they asked for and the status.",
            (*_KERNEL_LABELS, "transport", "code"),
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
            _REQUEST_BANDWIDTH_BUCKETS,
        )
        self._rejected = make.counter("rejected_total", "Requests turned away, by reason.", ("reason",))
        self._errors = make.counter("errors_total", "Requests answered with an error, by cause.", ("cause",))
        self.cancelled = make.counter(
            "cancelled_total", "Requests whose client left, by the stage they were in.", ("stage",)
        )
        for reason in REJECTIONS:
            self._rejected(reason)

    def observe(self, record: RequestRecord) -> None:
        elapsed = time.perf_counter() - record.began
        labels = (record.op, record.direction, record.transport)
        self._total(record.op, record.direction, record.dtype, record.transport, str(record.status)).inc()
        self._duration(*labels).observe(elapsed)
        for stage, seconds in record.stages.items():
            self._stage_duration(stage).observe(seconds)
        if record.error is not None:
            self._errors(record.error).inc()
        if record.error in REJECTIONS:
            self._rejected(record.error).inc()
        if record.status == CLIENT_LEFT:
            self.cancelled(record.waiting_in).inc()
        elif record.status < 300 and "kernel" in record.stages:
            self._bandwidth(*labels).observe((record.received + record.sent) / elapsed)


class _Launches:
    """What is known of a launch."""

    def __init__(self, make: _Registrar) -> None:
        self._bytes = make.counter(
            "kernel_bytes_total", "The fewest bytes that the launched operations had to move.", _KERNEL_LABELS
        )
        self._seconds = make.counter("kernel_seconds_total", "Device time of the launches.", _KERNEL_LABELS)
        self._bandwidth = make.histogram(
            "kernel_bandwidth_bytes_per_second",
            "Bandwidth of each launch: the fewest bytes over device time.",
            _KERNEL_LABELS,
            _KERNEL_BANDWIDTH_BUCKETS,
        )
        self._transfer_bytes = make.counter(
            "transfer_bytes_total", "Bytes of tensors copied to the device and back.", ("direction",)
        )
        self._transfer_seconds = make.counter(
            "transfer_seconds_total", "Time that copying them took.", ("direction",)
        )
        self._compiles = make.counter(
            "compiles_total", "Classes of requests that nothing foresaw and whose kernels were compiled.", ()
        )
        self._compile_seconds = make.counter("compile_seconds_total", "Time that compiling those took.", ())
        self._batch_requests = make.histogram(
            "batch_requests", "Requests that shared a launch.", (), _BATCH_REQUESTS_BUCKETS
        )
        self._batch_bytes = make.histogram(
            "batch_bytes", "Bytes of the tensors that came with a launch.", (), _BATCH_BYTES_BUCKETS
        )

    def observe_compile(self, seconds: float) -> None:
        self._compiles().inc()
        self._compile_seconds().inc(seconds)

    def observe(self, batch: Batch, execution: Execution) -> None:
        job = batch.jobs[0]
        labels = (job.spec.op.value, job.spec.direction.value, job.x.dtype.value)
        kernel_bytes = sum(execution.kernel_bytes)
        self._bytes(*labels).inc(kernel_bytes)
        self._seconds(*labels).inc(execution.kernel_s)
        if kernel_bytes and execution.kernel_s > 0:
            self._bandwidth(*labels).observe(kernel_bytes / execution.kernel_s)
        came = sum(job.nbytes for job in batch.jobs)
        went = sum(tensor.nbytes for outputs in execution.outputs for tensor in outputs.values())
        self._batch_requests().observe(len(batch.jobs))
        self._batch_bytes().observe(came)
        for direction, nbytes, seconds in (("in", came, execution.copy_in_s), ("out", went, execution.copy_out_s)):
            # What kernels read or write in the host's memory is not copied, and its time is the kernel's.
            if seconds > 0:
                self._transfer_bytes(direction).inc(nbytes)
                self._transfer_seconds(direction).inc(seconds)


class _State:
    """What holds at the moment of a scrape."""

    def __init__(self, make: _Registrar) -> None:
        self.inflight_requests = make.gauge(
            "inflight_requests", "Admitted operations whose last byte is not out yet."
        )
        self.inflight_bytes = make.gauge("inflight_bytes", "Bytes of bodies that those operations brought.")
        self.queue_requests = make.gauge("queue_requests", "Operations that wait for the device.")
        self.slab_bytes = make.gauge(
            "slab_bytes", "Memory for bodies and results, lent to requests or kept for the next.", ("state",)
        )
        self.copy_bandwidth = make.gauge(
            "device_copy_bandwidth_bytes_per_second",
            "Bytes read plus written a second by a copy on the device, measured at start: the roof.",
            ("device",),
        )
        self.build_info = make.gauge(
            "build_info", "Always 1; the labels say what runs.", ("version", "backend", "device")
        )
        self.ready = make.gauge("ready", "1 while the server takes work.")
        self.device_memory = _DeviceMemory()
        make.collector(self.device_memory)


class Metrics:
    """The server's metrics in one registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Args: registry: where to register; one of its own if none is given."""
        self.registry = registry or CollectorRegistry()
        make = _Registrar(self.registry)
        self._requests = _Requests(make)
        self._launches = _Launches(make)
        self._state = _State(make)
        self.catalogue = tuple(make.catalogue)

    def watch_inflight(self, requests: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report what has been admitted; asked at each scrape."""
        self._state.inflight_requests.set_function(requests)
        self._state.inflight_bytes.set_function(nbytes)

    def watch_slabs(self, used_bytes: Callable[[], int], idle_bytes: Callable[[], int]) -> None:
        """Report the memory of the slabs; asked at each scrape."""
        self._state.slab_bytes.labels("used").set_function(used_bytes)
        self._state.slab_bytes.labels("idle").set_function(idle_bytes)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report how many jobs wait; asked at each scrape."""
        self._state.queue_requests.set_function(length)

    def watch_device(self, backend: str, device: DeviceInfo, memory_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Report what runs, its roof and its memory."""
        self._state.build_info.labels(__version__, backend, device.name).set(1)
        self._state.copy_bandwidth.labels(device.name).set(device.copy_bandwidth)
        self._state.device_memory.read = memory_bytes

    def set_ready(self, ready: bool) -> None:
        """Report whether the server takes work."""
        self._state.ready.set(int(ready))

    def observe_launch(self, batch: Batch, execution: Execution) -> None:
        """Count one launch."""
        self._launches.observe(batch, execution)

    def observe_compile(self, seconds: float) -> None:
        """Count a class whose kernels were compiled beside the work."""
        self._launches.observe_compile(seconds)

    def observe_late_departure(self) -> None:
        """Count a client that left after the kernel had its whole response, and before it had read that."""
        self._requests.cancelled("send").inc()

    def observe_request(self, record: RequestRecord) -> None:
        """Count one request, at its very end."""
        self._requests.observe(record)

    def render(self) -> bytes:
        """The Prometheus text of everything."""
        return generate_latest(self.registry)
