"""All metrics of the server, and the only place that updates them.

Units are base units.  Label values are limited: never a shape, an id, a layer's name, a raw path or anything else
that a client chooses.
"""

from collections.abc import Callable, Iterable, Mapping

from normserve import __version__
from normserve.jobs.device import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob
from normserve.metrics.exposition import TextExposition
from normserve.metrics.launches import LaunchMetrics
from normserve.metrics.prepared_calls import PreparedCallCounters, PreparedCallMetrics
from normserve.metrics.registrar import MetricRegistry
from normserve.metrics.requests import RequestMetrics, RequestRecord, RequestTimes
from normserve.metrics.state import StateGauges

SPANS_DROPPED = ("queue_full", "export_failed")


class Metrics:
    """The server's metrics."""

    def __init__(self, process: str | None = None) -> None:
        """Args: process: its name, where there are several; a label of every series."""
        make = MetricRegistry()
        self._collect: Callable[[], None] = lambda: None
        self._requests = RequestMetrics(make)
        self._launches = LaunchMetrics(make)
        self._prepared_calls = PreparedCallMetrics(make)
        self._dropped_spans = make.counter(
            "trace_spans_dropped_total", "Spans of traces that the collector did not get, by reason.", ("reason",)
        )
        for reason in SPANS_DROPPED:
            self._dropped_spans(reason)
        self._state = StateGauges(make)
        self.catalogue = tuple(make.families)
        self._exposition = TextExposition(self.catalogue, {} if process is None else {"process": process})

    def prepared_call_counters(self, owner: str) -> PreparedCallCounters:
        """Return the counters of prepared calls with owners of a kind, one of `prepared_calls.OWNERS`."""
        return self._prepared_calls.of(owner)

    def watch_inflight(self, requests: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report what has been admitted; asked at each scrape."""
        self._state.watched += [(self._state.inflight_requests(), requests), (self._state.inflight_bytes(), nbytes)]

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Report how many connections are open; asked at each scrape."""
        self._state.watched.append((self._state.connections(), count))

    def watch_local(
        self, connections: Callable[[], int], nbytes: Callable[[], int], device_bytes: Callable[[], int]
    ) -> None:
        """Report the clients on the same host and the memory shared with them; asked at each scrape."""
        state = self._state
        state.watched += [(state.local_connections(), connections), (state.local_bytes(), nbytes)]
        state.watched.append((state.local_device_bytes(), device_bytes))

    def watch_front_ends(self, there: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Report the processes that speak HTTP for this one, by index and process; asked at each scrape."""
        self._state.read_front_ends = there

    def watch_slabs(self, used_bytes: Callable[[], int], idle_bytes: Callable[[], int]) -> None:
        """Report the memory of the slabs; asked at each scrape."""
        slabs = self._state.slab_bytes
        self._state.watched += [(slabs("used"), used_bytes), (slabs("idle"), idle_bytes)]

    def watch_layers(self, count: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report the registered layers; asked at each scrape."""
        self._state.watched.append((self._state.layers(), count))
        self._state.read_layer_bytes = nbytes

    def watch_regions(self, count: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report the regions that clients have registered; asked at each scrape."""
        self._state.watched += [(self._state.oip_regions(), count), (self._state.oip_region_bytes(), nbytes)]

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report how many jobs wait; asked at each scrape."""
        self._state.watched.append((self._state.queue_requests(), length))

    def watch_stall(self, seconds: Callable[[], float]) -> None:
        """Report for how long nothing has been finished; asked at each scrape."""
        self._state.watched.append((self._state.stall_seconds(), seconds))

    def watch_device(
        self, backend: str, device: DeviceDescription, memory_bytes: Callable[[], Mapping[str, int]]
    ) -> None:
        """Report what runs, its roof and its memory."""
        self._state.build_info(__version__, backend, device.name).set(1)
        self._state.copy_bandwidth(device.name).set(device.copy_bandwidth)
        self._state.read_device_memory = memory_bytes
        self._state.layers_are_kept_on = "host" if device.kind == "cpu" else "device"

    def set_ready(self, ready: bool) -> None:
        """Report whether the server takes work."""
        self._state.ready().set(ready)

    def announce_keys(self, names: Iterable[str]) -> None:
        """Show the series of API keys of these names from now on."""
        self._requests.announce_keys(names)

    def observe_launch(self, batch: Batch, execution: BatchResult) -> None:
        """Count one launch."""
        self._launches.observe(batch, execution)

    def observe_compile(self, seconds: float) -> None:
        """Count a class whose kernels were compiled beside the work."""
        self._launches.observe_compile(seconds)

    def observe_refused_connection(self, reason: str) -> None:
        """Count a connection that was refused; `reason` names the setting."""
        self._requests.refused_connections(reason).inc()

    def observe_late_departure(self) -> None:
        """Count a client that left after the kernel had its whole response, and before it had read that."""
        self._requests.cancelled("send").inc()

    def observe_revocation(self, reason: str) -> None:
        """Count a body that was cut off so that others could come in, by one of `revocation.REASONS`."""
        self._requests.revoked(reason).inc()

    def observe_dropped_spans(self, reason: str, count: int) -> None:
        """Count spans that are not exported, by one of `SPANS_DROPPED`; one thread for each reason."""
        self._dropped_spans(reason).inc(count)

    def observe_request(self, record: RequestRecord) -> None:
        """Count one request, at its very end."""
        self._requests.observe(record)

    def observe_replays(self, record: RequestRecord, times: RequestTimes, job: NormJob) -> None:
        """Count requests that were answered by a captured launch each.

        Args:
            record: of any of them.
            times: with the stages of a launch.
            job: of any of them.
        """
        self._requests.observe_alike(record, times)
        self._launches.observe_alike(job, record.sent, record.kernel_bytes, times.stages)

    def watch_replays(self, collect: Callable[[], None]) -> None:
        """Have what is counted elsewhere counted here before a scrape: `collect` calls `observe_replays`."""
        self._collect = collect

    def render(self) -> bytes:
        """The text of everything; `exposition.plain` and `exposition.open_metrics` make an answer of it."""
        self._collect()
        self._requests.settle()
        self._launches.settle()
        self._state.refresh()
        return self._exposition.render()
