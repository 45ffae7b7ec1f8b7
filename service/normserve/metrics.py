"""Every metric of the server, and the one place that increments them.

Units are base units, label sets are closed: never a shape, an id, a layer's name, a raw path or anything else
that a client chose.
"""

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from normserve import __version__
from normserve.device import DeviceInfo
from normserve.errors import NormserveError
from normserve.exposition import AnyFamily, Exposition
from normserve.instruments import Counter, Family, Gauge, Histogram
from normserve.jobs import Batch, Execution, Op, Pass
from normserve.tensors import DType

UNMATCHED = "__unmatched__"
NONE = "none"

#: The status under which a request is counted whose client was gone before its answer.
CLIENT_LEFT = 499

REJECTIONS = ("overloaded", "draining", "not_ready", "too_large", "deadline_exceeded")

_I = TypeVar("_I", Counter, Gauge, Histogram)

# What has ended is counted by so many: they are alike, and many values take a histogram little longer than one.
_COUNTED_AT_ONCE = 64

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
        began: its header was complete, by `time.perf_counter`.
        seconds: from then to its end.
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
    seconds: float = 0.0


class _Registrar:
    """Makes metrics and keeps them in order."""

    def __init__(self) -> None:
        self.families: list[AnyFamily] = []

    def counter(self, name: str, doc: str, labels: Sequence[str]) -> Family[Counter]:
        return self._kept(Family(f"normserve_{name}", doc, labels, Counter))

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        return self._kept(Family(f"normserve_{name}", doc, labels, Gauge))

    def histogram(self, name: str, doc: str, labels: Sequence[str], buckets: Sequence[float]) -> Family[Histogram]:
        return self._kept(Family(f"normserve_{name}", doc, labels, functools.partial(Histogram, buckets)))

    def foreign(self, metric: Metric) -> Family[Counter] | Family[Gauge]:
        """One that prometheus_client reads, under the name that it has there."""
        name, doc = metric.samples[0].name, metric.documentation
        if metric.type == "counter":
            return self._kept(Family(name, doc, (), Counter))
        return self._kept(Family(name, doc, (), Gauge))

    def _kept(self, family: Family[_I]) -> Family[_I]:
        self.families.append(family)
        return family


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
        self._ended: list[RequestRecord] = []
        # A rate sees the step from 0 to 1, and none from nothing to 1.
        for reason in REJECTIONS:
            self._rejected(reason)
        for cause in _causes(NormserveError):
            self._errors(cause)
        for stage in ("recv", "parse", "queue", "send"):
            self.cancelled(stage)

    def observe(self, record: RequestRecord) -> None:
        record.seconds = time.perf_counter() - record.began
        self._ended.append(record)
        if len(self._ended) >= _COUNTED_AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Count what has ended since the last time."""
        alike: dict[Hashable, list[RequestRecord]] = {}
        for record in self._ended:
            labels = (record.op, record.direction, record.dtype, record.transport, record.status)
            alike.setdefault((labels, record.error, record.waiting_in, *record.stages), []).append(record)
        self._ended.clear()
        for records in alike.values():
            self._count(records)

    def _count(self, records: Sequence[RequestRecord]) -> None:
        """Count requests of the same labels, that went through the same stages."""
        first, count = records[0], len(records)
        labels = (first.op, first.direction, first.transport)
        self._total(first.op, first.direction, first.dtype, first.transport, str(first.status)).inc(count)
        self._duration(*labels).observe_all([record.seconds for record in records])
        for stage in first.stages:
            self._stage_duration(stage).observe_all([record.stages[stage] for record in records])
        if first.error is not None:
            self._errors(first.error).inc(count)
        if first.error in REJECTIONS:
            self._rejected(first.error).inc(count)
        if first.status == CLIENT_LEFT:
            self.cancelled(first.waiting_in).inc(count)
        elif first.status < 300 and "kernel" in first.stages:
            rates = [(record.received + record.sent) / record.seconds for record in records]
            self._bandwidth(*labels).observe_all(rates)


def _causes(error: type[NormserveError]) -> set[str]:
    """The codes of an error and of everything below it."""
    return {error.code}.union(*(_causes(each) for each in error.__subclasses__()))


@dataclass(slots=True)
class _Launch:
    """What is counted of a launch: no more of it, so that its memory may go."""

    requests: int
    came: int
    went: int
    kernel_bytes: int
    kernel_s: float
    copy_in_s: float
    copy_out_s: float


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
        batch_requests = make.histogram(
            "batch_requests", "Requests that shared a launch.", (), _BATCH_REQUESTS_BUCKETS
        )
        batch_bytes = make.histogram(
            "batch_bytes", "Bytes of the tensors that came with a launch.", (), _BATCH_BYTES_BUCKETS
        )
        self._batch_requests, self._batch_bytes = batch_requests(), batch_bytes()
        self._ended: list[tuple[tuple[Op, Pass, DType], _Launch]] = []

    def observe_compile(self, seconds: float) -> None:
        self._compiles().inc()
        self._compile_seconds().inc(seconds)

    def observe(self, batch: Batch, execution: Execution) -> None:
        went = [len(tensor.data) for outputs in execution.outputs for tensor in outputs.values()]
        launch = _Launch(
            len(batch.jobs),
            batch.nbytes,
            sum(went),
            sum(execution.kernel_bytes),
            execution.kernel_s,
            execution.copy_in_s,
            execution.copy_out_s,
        )
        job = batch.jobs[0]
        self._ended.append(((job.spec.op, job.spec.direction, job.x.dtype), launch))
        if len(self._ended) >= _COUNTED_AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Count what has ended since the last time."""
        alike: dict[tuple[Op, Pass, DType], list[_Launch]] = {}
        for kind, launch in self._ended:
            alike.setdefault(kind, []).append(launch)
        self._ended.clear()
        for (op, direction, dtype), launches in alike.items():
            self._count((op.value, direction.value, dtype.value), launches)

    def _count(self, labels: tuple[str, str, str], launches: Sequence[_Launch]) -> None:
        """Count launches of the same labels."""
        self._bytes(*labels).inc(sum([launch.kernel_bytes for launch in launches]))
        self._seconds(*labels).inc(sum([launch.kernel_s for launch in launches]))
        timed = [launch for launch in launches if launch.kernel_bytes and launch.kernel_s > 0]
        if timed:
            self._bandwidth(*labels).observe_all([launch.kernel_bytes / launch.kernel_s for launch in timed])
        self._batch_requests.observe_all([launch.requests for launch in launches])
        self._batch_bytes.observe_all([launch.came for launch in launches])
        # What kernels read or write in the host's memory is not copied, and its time is the kernel's.
        self._count_copies("in", [(each.came, each.copy_in_s) for each in launches if each.copy_in_s > 0])
        self._count_copies("out", [(each.went, each.copy_out_s) for each in launches if each.copy_out_s > 0])

    def _count_copies(self, direction: str, copies: Sequence[tuple[int, float]]) -> None:
        if copies:
            self._transfer_bytes(direction).inc(sum([nbytes for nbytes, _ in copies]))
            self._transfer_seconds(direction).inc(sum([seconds for _, seconds in copies]))


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
        self.device_memory = make.gauge(
            "device_memory_bytes",
            "Memory of the device, by kind of use; of the CPU, what the process has resident.",
            ("kind",),
        )
        self.build_info = make.gauge(
            "build_info", "Always 1; the labels say what runs.", ("version", "backend", "device")
        )
        self.ready = make.gauge("ready", "1 while the server takes work.")
        self._process = ProcessCollector(registry=None)
        self._of_process = {each.name: make.foreign(each) for each in self._process.collect()}
        self.watched: list[tuple[Gauge, Callable[[], float]]] = []
        self.read_device_memory: Callable[[], Mapping[str, int]] = dict

    def refresh(self) -> None:
        """Ask for everything that nobody tells."""
        for gauge, read in self.watched:
            gauge.set(read())
        for kind, nbytes in self.read_device_memory().items():
            self.device_memory(kind).set(nbytes)
        for metric in self._process.collect():
            self._of_process[metric.name]().value = metric.samples[0].value


class Metrics:
    """The server's metrics."""

    def __init__(self, process: str | None = None) -> None:
        """Args: process: its name, where there are several; a label of every series."""
        make = _Registrar()
        self._requests = _Requests(make)
        self._launches = _Launches(make)
        self._state = _State(make)
        self.catalogue = tuple(make.families)
        self._exposition = Exposition(self.catalogue, {} if process is None else {"process": process})

    def watch_inflight(self, requests: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report what has been admitted; asked at each scrape."""
        self._state.watched += [(self._state.inflight_requests(), requests), (self._state.inflight_bytes(), nbytes)]

    def watch_slabs(self, used_bytes: Callable[[], int], idle_bytes: Callable[[], int]) -> None:
        """Report the memory of the slabs; asked at each scrape."""
        slabs = self._state.slab_bytes
        self._state.watched += [(slabs("used"), used_bytes), (slabs("idle"), idle_bytes)]

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report how many jobs wait; asked at each scrape."""
        self._state.watched.append((self._state.queue_requests(), length))

    def watch_device(self, backend: str, device: DeviceInfo, memory_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Report what runs, its roof and its memory."""
        self._state.build_info(__version__, backend, device.name).set(1)
        self._state.copy_bandwidth(device.name).set(device.copy_bandwidth)
        self._state.read_device_memory = memory_bytes

    def set_ready(self, ready: bool) -> None:
        """Report whether the server takes work."""
        self._state.ready().set(ready)

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
        self._requests.settle()
        self._launches.settle()
        self._state.refresh()
        return self._exposition.render()
