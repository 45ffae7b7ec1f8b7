"""The state of the server at the time of a scrape, with the operating system's measurements of its front ends."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import ProcessCollector

from normserve.metrics.instruments import Gauge
from normserve.metrics.registry import MetricRegistry


class StateGauges:
    """The gauges of the server's state, most of which are read only at a scrape."""

    def __init__(self, make: MetricRegistry) -> None:
        self.inflight_requests = make.add_gauge(
            "inflight_requests", "Admitted operations whose response is not complete."
        )
        self.inflight_bytes = make.add_gauge(
            "inflight_bytes", "Memory of these operations in bytes: bodies, results and temporary buffers."
        )
        self.layers = make.add_gauge("layers", "Registered layers.")
        self.layer_bytes = make.add_gauge(
            "layer_bytes", "Bytes of the parameters of registered layers, in host and device memory.", ("kind",)
        )
        self.connections = make.add_gauge("connections", "Open connections of clients.")
        self.local_connections = make.add_gauge(
            "local_connections", "Open connections of clients that share memory with the server."
        )
        self.local_bytes = make.add_gauge("local_bytes", "Bytes of host memory shared with these clients.")
        self.local_device_bytes = make.add_gauge(
            "local_device_bytes",
            "Bytes of device memory allocated for these clients; counted until the client's process ends.",
        )
        self.oip_regions = make.add_gauge(
            "oip_regions", "Shared-memory regions of /v2 that are registered or still in use by a request."
        )
        self.oip_region_bytes = make.add_gauge("oip_region_bytes", "Bytes of these regions.")
        self.queue_requests = make.add_gauge("queue_requests", "Operations in the queue for the device.")
        self.slab_bytes = make.add_gauge(
            "slab_bytes",
            "Bytes of buffers for bodies and results, in use by requests or kept for later ones.",
            ("state",),
        )
        self.copy_bandwidth = make.add_gauge(
            "device_copy_bandwidth_bytes_per_second",
            "Bytes read plus written per second by a copy in device memory, measured at start.",
            ("device",),
        )
        self.device_memory = make.add_gauge(
            "device_memory_bytes",
            "Device memory in bytes, by kind of use; for the CPU backend, the process's resident memory.",
            ("kind",),
        )
        self.build_info = make.add_gauge(
            "build_info",
            "Always 1; version, backend and device are in the labels.",
            ("version", "backend", "device"),
        )
        self.ready = make.add_gauge(
            "ready", "1 from the end of the warm-up to a signal or a failure, also while nothing is finished."
        )
        self.stall_seconds = make.add_gauge(
            "stall_seconds", "Time since the last operation finished, while others wait; 0 if none waits."
        )
        self._process = ProcessCollector(registry=None)
        self._process_families = {each.name: make.add_process_metric(each) for each in self._process.collect()}
        self._front_end_metrics = FrontEndMetrics(make)
        self.list_front_ends: Callable[[], Iterable[tuple[int, int]]] = tuple
        self.sources: list[tuple[Gauge, Callable[[], float]]] = []
        self.read_device_memory: Callable[[], Mapping[str, int]] = dict
        self.read_layer_bytes: Callable[[], int] = int
        self.layer_memory_kind = ""

    def refresh(self) -> None:
        """Set the gauges that are read only at a scrape: of the server, its device, its front ends and this
        process.
        """
        for gauge, read in self.sources:
            gauge.set(read())
        if self.layer_memory_kind:
            self.layer_bytes(self.layer_memory_kind).set(self.read_layer_bytes())
        for kind, nbytes in self.read_device_memory().items():
            self.device_memory(kind).set(nbytes)
        self._front_end_metrics.refresh(self.list_front_ends())
        for metric in self._process.collect():
            self._process_families[metric.name]().value = metric.samples[0].value


class FrontEndMetrics:
    """The CPU time, memory and descriptors of front-end processes, read at each scrape.

    The process that owns the device reads them, because front ends answer no scrapes.
    """

    def __init__(self, make: MetricRegistry) -> None:
        # Not "process", the label with the process of each series in a fleet.
        label = ("frontend",)
        self._cpu_seconds = make.add_counter(
            "frontend_cpu_seconds_total",
            "CPU time of each front end, including earlier processes with the same index.",
            label,
        )
        self._resident_bytes = make.add_gauge(
            "frontend_resident_memory_bytes",
            "Resident memory of each front end, including mapped shared buffers.",
            label,
        )
        self._open_fds = make.add_gauge("frontend_open_fds", "Open file descriptors of each front end.", label)
        # By index: the process id and the CPU time of the last reading.
        self._last_cpu_seconds: dict[int, tuple[int, float]] = {}

    def refresh(self, front_ends: Iterable[tuple[int, int]]) -> None:
        """Read the metrics of each running front end from the operating system; the gauges of ended ones become 0.

        Args: front_ends: index and process id of each running front end.
        """
        pids = dict(front_ends)
        for index, pid in pids.items():
            read = _read_process_metrics(pid)
            if "process_cpu_seconds_total" in read:
                self._add_cpu_seconds(index, pid, read["process_cpu_seconds_total"])
            self._resident_bytes(str(index)).set(read.get("process_resident_memory_bytes", 0))
            self._open_fds(str(index)).set(read.get("process_open_fds", 0))
        for index in self._last_cpu_seconds.keys() - pids:
            self._resident_bytes(str(index)).set(0)
            self._open_fds(str(index)).set(0)

    def _add_cpu_seconds(self, index: int, pid: int, seconds: float) -> None:
        """Add a front end's CPU time since the last reading to its counter; a new process with that index
        begins at 0.
        """
        last_pid, last = self._last_cpu_seconds.get(index, (pid, 0.0))
        self._cpu_seconds(str(index)).inc(max(0.0, seconds - (last if last_pid == pid else 0.0)))
        self._last_cpu_seconds[index] = (pid, seconds)


def _read_process_metrics(pid: int) -> dict[str, float]:
    """Read a process's metrics; none if the process has ended."""
    collected = ProcessCollector(registry=None, pid=lambda: pid).collect()
    return {metric.samples[0].name: metric.samples[0].value for metric in collected if metric.samples}
