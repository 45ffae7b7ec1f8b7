"""What holds at the moment of a scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import ProcessCollector

from normserve.metrics.front_ends import FrontEndProcesses
from normserve.metrics.instruments import Gauge
from normserve.metrics.registrar import Registrar


class State:
    """What holds at the moment of a scrape."""

    def __init__(self, make: Registrar) -> None:
        self.inflight_requests = make.gauge(
            "inflight_requests", "Admitted operations whose last byte is not out yet."
        )
        self.inflight_bytes = make.gauge(
            "inflight_bytes", "Bytes that those operations take: bodies, results, what computing needs."
        )
        self.layers = make.gauge("layers", "Registered layers.")
        self.layer_bytes = make.gauge(
            "layer_bytes", "Parameters of registered layers, by where they are kept: host or device.", ("kind",)
        )
        self.connections = make.gauge("connections", "Open connections of clients.")
        self.local_connections = make.gauge(
            "local_connections", "Open connections of clients that share memory with the server."
        )
        self.local_bytes = make.gauge("local_bytes", "Memory shared with those clients.")
        self.local_device_bytes = make.gauge(
            "local_device_bytes", "Memory of the device that those clients have, or had until their processes end."
        )
        self.oip_regions = make.gauge(
            "oip_regions", "Regions of shared memory that clients of /v2 have registered, or a request still uses."
        )
        self.oip_region_bytes = make.gauge("oip_region_bytes", "Bytes of those regions.")
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
        self.stall_seconds = make.gauge(
            "stall_seconds", "Time since anything was finished, while work waits to be; 0 while none does."
        )
        self._process = ProcessCollector(registry=None)
        self._of_process = {each.name: make.foreign(each) for each in self._process.collect()}
        self._front_ends = FrontEndProcesses(make)
        self.read_front_ends: Callable[[], Iterable[tuple[int, int]]] = tuple
        self.watched: list[tuple[Gauge, Callable[[], float]]] = []
        self.read_device_memory: Callable[[], Mapping[str, int]] = dict
        self.read_layer_bytes: Callable[[], int] = int
        self.layers_are_kept_on = ""

    def refresh(self) -> None:
        """Ask for everything that nobody tells."""
        for gauge, read in self.watched:
            gauge.set(read())
        if self.layers_are_kept_on:
            self.layer_bytes(self.layers_are_kept_on).set(self.read_layer_bytes())
        for kind, nbytes in self.read_device_memory().items():
            self.device_memory(kind).set(nbytes)
        self._front_ends.refresh(self.read_front_ends())
        for metric in self._process.collect():
            self._of_process[metric.name]().value = metric.samples[0].value
