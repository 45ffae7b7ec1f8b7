"""Measurements of the operating system for the front ends of this process."""

from collections.abc import Iterable

from prometheus_client import ProcessCollector

from normserve.metrics.registry import MetricRegistry


class FrontEndMetrics:
    """Metrics of front ends, read at each scrape by the process that owns the device: front ends answer
    no scrapes.
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

    def refresh(self, there: Iterable[tuple[int, int]]) -> None:
        """Args: there: index and process id of each running front end."""
        pids = dict(there)
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
        last_pid, last = self._last_cpu_seconds.get(index, (pid, 0.0))
        self._cpu_seconds(str(index)).inc(max(0.0, seconds - (last if last_pid == pid else 0.0)))
        self._last_cpu_seconds[index] = (pid, seconds)


def _read_process_metrics(pid: int) -> dict[str, float]:
    """Read a process's metrics; none if the process has ended."""
    collected = ProcessCollector(registry=None, pid=lambda: pid).collect()
    return {metric.samples[0].name: metric.samples[0].value for metric in collected if metric.samples}
