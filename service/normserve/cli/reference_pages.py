"""The pages of docs/ that are made from the code: `python -m normserve.cli.reference_pages docs` writes them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from normserve.metrics.exposition import make_process_up_family
from normserve.metrics.metrics import Metrics
from normserve.settings import Settings

_SETTINGS = """# Settings

Settings are read once, at start. A command-line option takes precedence over the environment variable, which takes
precedence over the default. `normserve serve --help` lists the same settings. Sizes in bytes may have a unit:
`512MiB`, `1.5GiB`, or `2GB` (decimal). The server warns about unknown variables that begin with `NORMSERVE_`,
and refuses settings of earlier versions, with a line that says what to do instead.

"""

_METRICS = """# Metrics

`GET /metrics` returns the Prometheus text format, or OpenMetrics if the `Accept` header contains
`application/openmetrics-text`; the duration histograms then have exemplars with trace ids
([observability.md](observability.md)). It is compressed if `Accept-Encoding` names gzip, as Prometheus does. All
values are in base units.

The values of all labels are limited, so that clients cannot create new series:

- `op`: an operation, the name of another route, or `__unmatched__`;
- `pass`: `forward`, `backward` or `none`;
- `dtype`: the element type of x;
- `transport`: `tcp`, `unix`, `local` (shared memory), `local_cuda` (the same, with tensors in GPU memory); for
  requests under `/v2` `oip`, or `grpc` if the gateway of gRPC passes them on, or `oip_shm` and `oip_cuda` if they
  use or register regions of shared memory or of CUDA memory;
- `code`: the HTTP status; 499 if the client disconnected;
- `code_class`: its class: `2xx` results, `4xx` what the client did or may repeat, `5xx` what the server did;
- `child`: a process that another one of the server starts, as the log names it, and `gateway` for that of gRPC;
- `key`: the name of an API key that the server has known since its start.

`rate(normserve_kernel_bytes_total)` divided by `rate(normserve_kernel_seconds_total)` is the mean bandwidth of the
kernels. Divided by `normserve_device_copy_bandwidth_bytes_per_second`, it is the fraction of a copy's bandwidth.
The buckets of durations double from 10 µs to 5.6 minutes, which is beyond the default of `--transfer-timeout-s`.
Those of kernel bandwidth double from 1 MB/s to 1 GB/s; from there to 8 TB/s each is 1.25 times the one below, so
that a loss of a fifth is a bucket.

Two quantities are bytes a second of requests. The *request bandwidth* is that of one request: the bytes of its
bodies over its duration (`normserve_request_bandwidth_bytes_per_second`). The *served throughput* is that of the
server, the bytes of all requests over the time:
`sum(rate(normserve_body_bytes_total{op=~".*_norm(_chain)?"}[1m]))`. With several requests at once, the throughput
is larger. It is what `normload` reports, except that `normload` leaves out requests without a result.

With `--devices`, each process returns the metrics of all processes: each series has the additional label `process`,
and `normserve_process_up` is 1 for the processes that respond. Metrics that begin with `process_` are those of the
operating system for the server's process.

"""


def make_settings_page() -> str:
    """Make the text of docs/settings.md, with a table of all settings."""
    rows = [
        (
            f"`--{name.replace('_', '-')}`",
            f"`NORMSERVE_{name.upper()}`",
            _format_default(field.default),
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]
    return _SETTINGS + _format_table(("option", "environment", "default", "meaning"), rows)


def make_metrics_page() -> str:
    """Make the text of docs/metrics.md, with a table of all metrics."""
    families = (*Metrics().families, make_process_up_family())
    rows = [(f"`{each.name}`", each.kind, ", ".join(each.label_names), each.help_text) for each in families]
    return _METRICS + _format_table(("metric", "kind", "labels", "meaning"), rows)


PAGES = {"settings.md": make_settings_page, "metrics.md": make_metrics_page}


def _format_default(default: object) -> str:
    return "" if default is None else f"`{default}`"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
