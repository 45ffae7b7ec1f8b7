"""The state of the server at the time of a scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import ProcessCollector

from normserve.metrics.front_ends import FrontEndMetrics
from normserve.metrics.instruments import Gauge
from normserve.metrics.registrar import MetricRegistry


class StateGauges:
    """What holds at the moment of a scrape."""

    def __init__(self, make: MetricRegistry) -> None:
        self.inflight_requests = make.gauge(
            "inflight_requests", "Admitted operations whose response is not complete."
        )
        self.inflight_bytes = make.gauge(
            "inflight_bytes", "Memory of these operations in bytes: bodies, results and temporary buffers."
        )
        self.layers = make.gauge("layers", "Registered layers.")
        self.layer_bytes = make.gauge(
            "layer_bytes", "Bytes of the parameters of registered layers, in host and device memory.", ("kind",)
        )
        self.connections = make.gauge("connections", "Open connections of clients.")
        self.local_connections = make.gauge(
            "local_connections", "Open connections of clients that share memory with the server."
        )
        self.local_bytes = make.gauge("local_bytes", "Bytes of host memory shared with these clients.")
        self.local_device_bytes = make.gauge(
            "local_device_bytes",
            "Bytes of device memory allocated for these clients; counted until the client's process ends.",
        )
        self.oip_regions = make.gauge(
            "oip_regions", "Shared-memory regions of /v2 that are registered or still in use by a request."
        )
        self.oip_region_bytes = make.gauge("oip_region_bytes", "Bytes of these regions.")
        self.queue_requests = make.gauge("queue_requests", "Operations in the queue for the device.")
        self.slab_bytes = make.gauge(
            "slab_bytes",
            "Bytes of buffers for bodies and results, in use by requests or kept for later ones.",
            ("state",),
        )
        self.copy_bandwidth = make.gauge(
            "device_copy_bandwidth_bytes_per_second",
            "Bytes read plus written per second by a copy in device memory, measured at start.",
            ("device",),
        )
        self.device_memory = make.gauge(
            "device_memory_bytes",
            "Device memory in bytes, by kind of use; for the CPU backend, the process's resident memory.",
            ("kind",),
        )
        self.build_info = make.gauge(
            "build_info",
            "Always 1; version, backend and device are in the labels.",
            ("version", "backend", "device"),
        )
        self.ready = make.gauge("ready", "1 while the server accepts work.")
        self.stall_seconds = make.gauge(
            "stall_seconds", "Time since the last operation finished, while others wait; 0 if none waits."
        )
        self._process = ProcessCollector(registry=None)
        self._of_process = {each.name: make.foreign(each) for each in self._process.collect()}
        self._front_ends = FrontEndMetrics(make)
        self.read_front_ends: Callable[[], Iterable[tuple[int, int]]] = tuple
        self.watched: list[tuple[Gauge, Callable[[], float]]] = []
        self.read_device_memory: Callable[[], Mapping[str, int]] = dict
        self.read_layer_bytes: Callable[[], int] = int
        self.layers_are_kept_on = ""

    def refresh(self) -> None:
        """Read everything that is not reported."""
        for gauge, read in self.watched:
            gauge.set(read())
        if self.layers_are_kept_on:
            self.layer_bytes(self.layers_are_kept_on).set(self.read_layer_bytes())
        for kind, nbytes in self.read_device_memory().items():
            self.device_memory(kind).set(nbytes)
        self._front_ends.refresh(self.read_front_ends())
        for metric in self._process.collect():
            self._of_process[metric.name]().value = metric.samples[0].value
