"""All metrics of the server, and the only place that updates them, except for the counters of prepared calls.

Units are base units.  Label values are limited: never a shape, an id, a layer's name, a raw path or anything else
that a client chooses.
"""

from collections.abc import Callable, Iterable, Mapping

from normserve import __version__
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob
from normserve.metrics.exposition import TextExposition
from normserve.metrics.launch_metrics import LaunchMetrics
from normserve.metrics.prepared_call_metrics import PreparedCallCounters, PreparedCallMetrics
from normserve.metrics.registry import MetricRegistry
from normserve.metrics.request_metrics import RequestMetrics, RequestRecord, RequestTimes
from normserve.metrics.state_gauges import StateGauges

SPANS_DROPPED = ("queue_full", "export_failed")


class Metrics:
    """All metrics of this process.  Only the methods of this class update them."""

    def __init__(self, process: str | None = None) -> None:
        """Args: process: this process's name in a fleet, which becomes a label of every series; None for a single
        process.
        """
        make = MetricRegistry()
        self._collect_replays: Callable[[], None] = lambda: None
        self._request_metrics = RequestMetrics(make)
        self._launch_metrics = LaunchMetrics(make)
        self._prepared_calls = PreparedCallMetrics(make)
        self._dropped_spans = make.add_counter(
            "trace_spans_dropped_total", "Spans of traces that the collector did not get, by reason.", ("reason",)
        )
        for reason in SPANS_DROPPED:
            self._dropped_spans(reason)
        self._restarts = make.add_counter(
            "child_restarts_total",
            "Restarts of each process that another process of the server starts, by its name in the log.",
            ("child",),
        )
        self._state_gauges = StateGauges(make)
        self.families = tuple(make.families)
        self._exposition = TextExposition(self.families, {} if process is None else {"process": process})

    def get_prepared_call_counters(self, owner: str) -> PreparedCallCounters:
        """Return the counters of prepared calls for one of `prepared_call_metrics.OWNERS`."""
        return self._prepared_calls.get_counters(owner)

    def track_inflight(self, requests: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Set two functions, which are called at each scrape.  One returns the number of requests in progress, the
        other their bytes.
        """
        self._state_gauges.sources += [
            (self._state_gauges.inflight_requests(), requests),
            (self._state_gauges.inflight_bytes(), nbytes),
        ]

    def track_connections(self, count: Callable[[], int]) -> None:
        """Report how many connections are open; read at each scrape."""
        self._state_gauges.sources.append((self._state_gauges.connections(), count))

    def track_local_clients(
        self, connections: Callable[[], int], nbytes: Callable[[], int], device_bytes: Callable[[], int]
    ) -> None:
        """Set three functions, which are called at each scrape.  They return the connections of clients on the same
        host, and the host and device bytes shared with them.
        """
        state = self._state_gauges
        state.sources += [(state.local_connections(), connections), (state.local_bytes(), nbytes)]
        state.sources.append((state.local_device_bytes(), device_bytes))

    def track_front_ends(self, list_front_ends: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Report the front ends, by index and process id; read at each scrape."""
        self._state_gauges.list_front_ends = list_front_ends

    def track_slabs(self, used_bytes: Callable[[], int], idle_bytes: Callable[[], int]) -> None:
        """Report the memory of the slabs; read at each scrape."""
        slabs = self._state_gauges.slab_bytes
        self._state_gauges.sources += [(slabs("used"), used_bytes), (slabs("idle"), idle_bytes)]

    def track_layers(self, count: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Report the registered layers; read at each scrape."""
        self._state_gauges.sources.append((self._state_gauges.layers(), count))
        self._state_gauges.read_layer_bytes = nbytes

    def track_regions(self, count: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Set the functions that return the number and bytes of regions registered by clients, called at each
        scrape.
        """
        self._state_gauges.sources += [
            (self._state_gauges.oip_regions(), count),
            (self._state_gauges.oip_region_bytes(), nbytes),
        ]

    def track_queue(self, length: Callable[[], int]) -> None:
        """Report how many jobs wait; read at each scrape."""
        self._state_gauges.sources.append((self._state_gauges.queue_requests(), length))

    def track_stall(self, seconds: Callable[[], float]) -> None:
        """Report for how long nothing has been finished; read at each scrape."""
        self._state_gauges.sources.append((self._state_gauges.stall_seconds(), seconds))

    def track_device(
        self, backend: str, device: DeviceDescription, memory_bytes: Callable[[], Mapping[str, int]]
    ) -> None:
        """Set the metrics of the backend, the device and its peak bandwidth, and the function that reads its
        memory.

        The function is called at each scrape.
        """
        self._state_gauges.build_info(__version__, backend, device.name).set(1)
        self._state_gauges.copy_bandwidth(device.name).set(device.copy_bandwidth)
        self._state_gauges.read_device_memory = memory_bytes
        self._state_gauges.layer_memory_kind = "host" if device.kind == "cpu" else "device"

    def set_ready(self, ready: bool) -> None:
        """Report whether the server is warm, and has received no signal and not failed."""
        self._state_gauges.ready().set(ready)

    def add_key_series(self, names: Iterable[str]) -> None:
        """Show the series of API keys of these names from now on."""
        self._request_metrics.add_key_series(names)

    def observe_launch(self, batch: Batch, execution: BatchResult) -> None:
        """Count one launch."""
        self._launch_metrics.observe_launch(batch, execution)

    def observe_compile(self, seconds: float) -> None:
        """Count a compilation of a class's kernels after the start."""
        self._launch_metrics.observe_compile(seconds)

    def observe_refused_connection(self, reason: str) -> None:
        """Count a connection that was refused; `reason` names the setting."""
        self._request_metrics.refused_connections(reason).inc()

    def observe_restarts(self, child: str, count: int = 1) -> None:
        """Count the restarts of a process of this server; none creates its series."""
        self._restarts(child).inc(count)

    def observe_unread_response_disconnect(self) -> None:
        """Count a client that disconnected after its entire response was written to the socket, but before it
        had read it.
        """
        self._request_metrics.disconnects("send").inc()

    def observe_revocation(self, reason: str) -> None:
        """Count a body that was aborted in favour of other requests, by one of `revocation.REASONS`."""
        self._request_metrics.revoked_bodies(reason).inc()

    def observe_dropped_spans(self, reason: str, count: int) -> None:
        """Count spans that are not exported, by one of `SPANS_DROPPED`; one thread for each reason."""
        self._dropped_spans(reason).inc(count)

    def observe_request(self, record: RequestRecord) -> None:
        """Count one request, at its very end."""
        self._request_metrics.observe_request(record)

    def observe_replays(self, record: RequestRecord, times: RequestTimes, job: NormJob) -> None:
        """Count requests that replays of one captured launch have answered.  The requests are equal except for
        their durations.

        Args:
            record: of any of them.
            times: with the stages of a launch.
            job: of any of them.
        """
        self._request_metrics.observe_replays(record, times)
        self._launch_metrics.observe_replays(job, record.sent_bytes, record.kernel_bytes, times.stage_seconds)

    def set_replay_collector(self, collect: Callable[[], None]) -> None:
        """Set a function to call before each scrape, which counts replayed requests with `observe_replays`."""
        self._collect_replays = collect

    def render(self) -> bytes:
        """Render the current values of all metrics as Prometheus text with exemplars.

        `exposition.strip_exemplars` and `exposition.convert_to_open_metrics` convert it to the format of a
        response. Requests and launches that were only recorded are counted first.
        """
        self._collect_replays()
        self._request_metrics.flush()
        self._launch_metrics.flush()
        self._state_gauges.refresh()
        return self._exposition.render()
