"""The source of dashboards/normserve.json: `python docker/grafana/dashboard.py` writes it.

Nine tenths of that file are what all panels have in common.  Here a panel is what it shows: a title, a unit and
queries, each with the text of its legend.  `$op` and `$instance` are what is chosen at the top of the page.
"""

import itertools
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
)
from normserve.metrics.request_metrics import STAGES
from panels import HERE, OPS, PEAK, SOURCE, kernel_bandwidth, lines, mean, numbers, quantile, rate

TARGET = Path(__file__).parent / "dashboards/normserve.json"
OF_JOB = f'job="normserve",{HERE}'
OPERATIONS = ("layer_norm", "rms_norm", "group_norm", "layer_norm_chain")


def overview() -> list[stat.Panel]:
    """The first row."""
    share = f"{kernel_bandwidth('')} / scalar(max({PEAK}))"
    runs = f"count by (version, backend, device) (normserve_build_info{{{HERE}}})"
    return [
        numbers(
            "Processes that take work",
            "Ready, of those that are scraped.",
            "short",
            [(f"sum(normserve_ready{{{HERE}}})", "ready"), (f"count(normserve_ready{{{HERE}}})", "scraped")],
        ).span(5),
        numbers(
            "What runs",
            "Version, backend and device.",
            "short",
            [(runs, "normserve {{version}} · {{backend}} · {{device}}")],
            names_only=True,
        ).span(9),
        numbers(
            "Of peak bandwidth",
            "Kernel bandwidth: the least that launches had to move, over device time, as a share of a copy's.",
            "percentunit",
            [(share, "of peak bandwidth")],
        ).span(5),
        numbers(
            "Requests in flight",
            "Admitted operations whose response is not complete.",
            "short",
            [(f"sum(normserve_inflight_requests{{{HERE}}})", "in flight")],
        ).span(5),
    ]


def requests() -> list[timeseries.Panel]:
    """What is asked, and how it ends."""
    total, duration = "normserve_requests_total", "normserve_request_duration_seconds"
    results, others = f'{OPS},code_class="2xx"', f'{OPS},code_class!="2xx"'
    routes = f'{HERE},op!~".*_norm(_chain)?"'
    return [
        lines(
            "Requests",
            "Answered a second, by operation and pass.",
            "reqps",
            [(rate(total, "op, pass"), "{{op}} {{pass}}")],
            stacked=True,
        ).span(8),
        lines(
            "Errors",
            "Answered a second with 4xx or 5xx, by operation and status; 499 is a client that left.",
            "reqps",
            [(rate(total, "op, code", f'{OPS},code=~"[45].."'), "{{op}} {{code}}")],
        ).span(8),
        lines(
            "Latency",
            "From a request's header to the last byte of its response, of operations with a result (2xx).",
            "s",
            [
                (quantile(0.5, duration, "op, pass", results), "{{op}} {{pass}} p50"),
                (quantile(0.99, duration, "op, pass", results), "{{op}} {{pass}} p99"),
            ],
        ).span(8),
        lines(
            "Latency of rejections and failures",
            "The same of operations without a result, by class of status: 4xx is the client's, 5xx the server's.",
            "s",
            [
                (quantile(0.5, duration, "code_class", others), "{{code_class}} p50"),
                (quantile(0.99, duration, "code_class", others), "{{code_class}} p99"),
            ],
        ).span(8),
        lines(
            "Probes, scrapes and other routes",
            "Answered a second, by route and class of status.",
            "reqps",
            [(rate(f"{duration}_count", "op, code_class", routes), "{{op}} {{code_class}}")],
        ).span(8),
        lines(
            "Requests by key",
            "Authenticated requests a second, by the name of their API key and by status.",
            "reqps",
            [(rate("normserve_key_requests_total", "key, code", HERE), "{{key}} {{code}}")],
        ).span(8),
    ]


def kernels() -> list[timeseries.Panel]:
    """Bandwidth against peak bandwidth."""
    histogram = "normserve_kernel_bandwidth_bytes_per_second"
    peak = (PEAK, "peak of {{device}}")
    share = f"{kernel_bandwidth('op, pass')} / scalar(max({PEAK}))"
    return [
        lines(
            "Kernel bandwidth",
            "Minimum of bytes that the launches have to move, divided by their device time. Dashed: peak bandwidth,"
            " that of a copy in device memory. Small tensors that stay in a cache can exceed it.",
            "Bps",
            [(kernel_bandwidth("op, pass"), "{{op}} {{pass}} mean"), peak],
        ).span(8),
        lines(
            "Kernel bandwidth of launches",
            "Each launch counts the same, the smallest too. A loss of a fifth is at least one bucket.",
            "Bps",
            [
                (quantile(0.5, histogram, "op, pass"), "{{op}} {{pass}} p50"),
                (quantile(0.95, histogram, "op, pass"), "{{op}} {{pass}} p95"),
                peak,
            ],
        ).span(8),
        lines(
            "Kernel bandwidth, of peak bandwidth",
            "The mean as a share of what a copy reaches on the device.",
            "percentunit",
            [(share, "{{op}} {{pass}}")],
        ).span(8),
    ]


def way() -> list[timeseries.Panel]:
    """From the socket to the device and back."""
    duration, bandwidth = "normserve_stage_duration_seconds", "normserve_request_bandwidth_bytes_per_second"
    stages = [(mean(duration, "stage", f'{HERE},stage="{stage}"'), "{{stage}}") for stage in STAGES]
    transfer = f"{rate('normserve_transfer_bytes_total', 'direction', HERE)}"
    transfer_time = f"{rate('normserve_transfer_seconds_total', 'direction', HERE)}"
    return [
        lines(
            "Where the time goes",
            "Mean time that an operation spends in each stage, in the order in which it passes them.",
            "s",
            stages,
            stacked=True,
        ).span(8),
        lines(
            "Served throughput",
            "Bytes of the bodies of operations a second, in and out, over all of them: what normload reports.",
            "Bps",
            [(rate("normserve_body_bytes_total", "transport, direction"), "{{transport}} {{direction}}")],
            stacked=True,
        ).span(8),
        lines(
            "Request bandwidth",
            "Bytes of one operation's request and response over its duration; of those at once, each has its own.",
            "Bps",
            [
                (mean(bandwidth, "transport"), "{{transport}} mean"),
                (quantile(0.5, bandwidth, "transport"), "{{transport}} p50"),
                (quantile(0.95, bandwidth, "transport"), "{{transport}} p95"),
            ],
        ).span(8),
        lines(
            "Copies to the device and back",
            "Bytes of tensors over the time that bringing them took.",
            "Bps",
            [(f"{transfer} / {transfer_time}", "{{direction}}")],
        ).span(8),
        lines(
            "Bytes by key",
            "Bytes a second of the bodies of authenticated requests, by the name of their API key.",
            "Bps",
            [(rate("normserve_key_bytes_total", "key, direction", HERE), "{{key}} {{direction}}")],
        ).span(8),
        lines(
            "Prepared calls",
            "Look-ups a second in the caches of prepared calls, and entries discarded to limit their memory.",
            "ops",
            [(rate("normserve_prepared_calls_total", "owner, event", HERE), "{{owner}} {{event}}")],
        ).span(8),
    ]


def load() -> list[timeseries.Panel]:
    """How full the server is."""
    return [
        lines(
            "In flight and waiting",
            "Admitted operations, and those of them that wait for the device.",
            "short",
            [
                (f"sum(normserve_inflight_requests{{{HERE}}})", "in flight"),
                (f"sum(normserve_queue_requests{{{HERE}}})", "waiting for the device"),
            ],
        ).span(6),
        lines(
            "Bytes in flight",
            "Memory of admitted operations: bodies, results and temporary buffers.",
            "bytes",
            [(f"sum(normserve_inflight_bytes{{{HERE}}})", "in flight")],
        ).span(6),
        lines(
            "Requests of a launch",
            "Batches: requests that shared a launch.",
            "short",
            [
                (mean("normserve_batch_requests", "instance", HERE), "{{instance}} mean"),
                (quantile(0.95, "normserve_batch_requests", "instance", HERE), "{{instance}} p95"),
            ],
        ).span(6),
        lines(
            "Bytes of a launch",
            "Tensors that came with a launch.",
            "bytes",
            [
                (mean("normserve_batch_bytes", "instance", HERE), "{{instance}} mean"),
                (quantile(0.95, "normserve_batch_bytes", "instance", HERE), "{{instance}} p95"),
            ],
        ).span(6),
        lines(
            "Turned away",
            "A second, by reason and class of status, without probes and scrapes.",
            "reqps",
            [(rate("normserve_rejected_total", "reason, code_class", HERE), "{{reason}} {{code_class}}")],
        ).span(8),
        lines(
            "Refused connections",
            "A second, by the limit that was reached. Their requests are in no other panel.",
            "ops",
            [(rate("normserve_connections_refused_total", "reason", HERE), "{{reason}}")],
        ).span(8),
        lines(
            "Aborted bodies",
            "Bodies a second that were aborted in favour of other requests, by reason.",
            "ops",
            [(rate("normserve_revoked_total", "reason", HERE), "{{reason}}")],
        ).span(8),
        lines(
            "Time without progress",
            "Since the last operation finished, while others wait; 0 if none waits.",
            "s",
            [(f"max by (instance) (normserve_stall_seconds{{{HERE}}})", "{{instance}}")],
        ).span(8),
        lines(
            "Answered with an error",
            "A second, by cause, whatever was asked.",
            "reqps",
            [(rate("normserve_errors_total", "cause", HERE), "{{cause}}")],
        ).span(8),
        lines(
            "Clients that left",
            "A second, by the stage that their request was in.",
            "reqps",
            [(rate("normserve_cancelled_total", "stage", HERE), "{{stage}}")],
        ).span(8),
    ]


def resources() -> list[timeseries.Panel]:
    """What it takes."""
    return [
        lines(
            "Device memory",
            "By kind of use; of the CPU, what the process has resident.",
            "bytes",
            [(f"sum by (kind) (normserve_device_memory_bytes{{{HERE}}})", "{{kind}}")],
        ).span(6),
        lines(
            "Slabs",
            "Bytes of buffers for bodies and results, in use by requests or kept for later ones.",
            "bytes",
            [(f"sum by (state) (normserve_slab_bytes{{{HERE}}})", "{{state}}")],
            stacked=True,
        ).span(6),
        lines(
            "Compiles",
            "Classes of requests a second whose kernels are compiled on their first request, and how many at once.",
            "short",
            [
                (rate("normserve_compiles_total", "instance", HERE), "{{instance}} a second"),
                (rate("normserve_compile_seconds_total", "instance", HERE), "{{instance}} at once"),
            ],
        ).span(6),
        lines(
            "Processor time",
            "Seconds a second of the processes with a device: how many cores they keep busy.",
            "short",
            [(rate("process_cpu_seconds_total", "instance", OF_JOB), "{{instance}}")],
        ).span(6),
        lines(
            "Layers, regions and clients that share memory",
            "Registered layers, regions of shared memory under /v2, and connections over shared memory.",
            "short",
            [
                (f"sum(normserve_layers{{{HERE}}})", "layers"),
                (f"sum(normserve_oip_regions{{{HERE}}})", "regions"),
                (f"sum(normserve_local_connections{{{HERE}}})", "connections"),
            ],
        ).span(6),
        lines(
            "Memory of layers, regions and clients",
            "Parameters of layers by kind of memory, regions under /v2, and what clients on the host share.",
            "bytes",
            [
                (f"sum by (kind) (normserve_layer_bytes{{{HERE}}})", "layers, {{kind}}"),
                (f"sum(normserve_oip_region_bytes{{{HERE}}})", "regions"),
                (f"sum(normserve_local_bytes{{{HERE}}})", "shared with clients"),
                (f"sum(normserve_local_device_bytes{{{HERE}}})", "device, for clients"),
            ],
        ).span(6),
        lines(
            "Memory of processes",
            "Resident and virtual memory of the processes with a device, as the operating system counts it.",
            "bytes",
            [
                (f"sum by (instance) (process_resident_memory_bytes{{{OF_JOB}}})", "{{instance}} resident"),
                (f"sum by (instance) (process_virtual_memory_bytes{{{OF_JOB}}})", "{{instance}} virtual"),
            ],
        ).span(6),
        lines(
            "Open files",
            "File descriptors of the processes with a device, and the lowest limit of one of them.",
            "short",
            [
                (f"max by (instance) (process_open_fds{{{OF_JOB}}})", "{{instance}}"),
                (f"min by (instance) (process_max_fds{{{OF_JOB}}})", "{{instance}} limit"),
            ],
        ).span(6),
        lines(
            "Uptime",
            "Since the start of the process that was started last.",
            "s",
            [(f"time() - max by (instance) (process_start_time_seconds{{{OF_JOB}}})", "{{instance}}")],
        ).span(6),
        lines(
            "Processes and restarts",
            "Of several processes: how many with a device respond, and restarts of each in the last half hour.",
            "short",
            [
                (f"sum by (instance) (normserve_process_up{{{HERE}}})", "{{instance}} respond"),
                (
                    f"sum by (instance, child) (increase(normserve_child_restarts_total{{{HERE}}}[30m]))",
                    "{{instance}} restarts of {{child}}",
                ),
            ],
        ).span(6),
        lines(
            "Dropped spans",
            "Spans of traces a second that the collector did not get, by reason.",
            "short",
            [(rate("normserve_trace_spans_dropped_total", "reason", HERE), "{{reason}}")],
        ).span(6),
    ]


def front_ends() -> list[timeseries.Panel]:
    """The processes that speak HTTP, with `--frontends`."""
    each, legend = "sum by (instance, frontend)", "{{instance}} front end {{frontend}}"
    return [
        lines(
            "Processor time of front ends",
            "Cores that each front end keeps busy, 1 at most. Near 1 in all of them: one more front end helps.",
            "short",
            [(rate("normserve_frontend_cpu_seconds_total", "instance, frontend", HERE), legend)],
        ).span(6),
        lines(
            "Memory of front ends",
            "Resident memory of each front end, with the shared slabs that it maps.",
            "bytes",
            [(f"{each} (normserve_frontend_resident_memory_bytes{{{HERE}}})", legend)],
        ).span(6),
        lines(
            "Open files of front ends",
            "File descriptors of each front end; each connection of a client takes one.",
            "short",
            [(f"{each} (normserve_frontend_open_fds{{{HERE}}})", legend)],
        ).span(6),
        lines(
            "Connections",
            "Open connections of clients, with front ends or without.",
            "short",
            [(f"sum by (instance) (normserve_connections{{{HERE}}})", "{{instance}}")],
        ).span(6),
    ]


def build() -> str:
    """The dashboard as Grafana reads it."""
    chosen = VariableOption(text=["All"], value=["$__all"])
    operation = dashboard.CustomVariable("op").label("operation").values(",".join(OPERATIONS)).multi(True)
    operation = operation.include_all(True).all_value(".*_norm(_chain)?").current(chosen)
    instance = dashboard.QueryVariable("instance").label("server").datasource(SOURCE).multi(True)
    instance = instance.query("label_values(normserve_ready, instance)").include_all(True).all_value(".+")
    instance = instance.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).current(chosen)
    page = dashboard.Dashboard("normserve").uid("normserve").tags(["normserve"]).editable().timezone("browser")
    page.description("What normserve does, how fast, and how near to peak bandwidth.")
    page.time("now-15m", "now").refresh("5s").tooltip(DashboardCursorSync.CROSSHAIR)
    page.with_variable(instance).with_variable(operation)
    ids = itertools.count(1)
    for number in overview():
        page.with_panel(number.id(next(ids)))
    for title, panels in {
        "Traffic": requests(),
        "Kernels": kernels(),
        "From the socket to the device and back": way(),
        "Load": load(),
        "Resources": resources(),
        "Front ends": front_ends(),
    }.items():
        page.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            page.with_panel(panel.id(next(ids)))
    built = page.build()
    for variable in built.templating.list_val or []:
        # The builders give every variable what only one that counts intervals has.
        variable.auto = variable.auto_count = variable.auto_min = None
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(built) + "\n"


if __name__ == "__main__":
    TARGET.write_text(build(), encoding="utf-8")
