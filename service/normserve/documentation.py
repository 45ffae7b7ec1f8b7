"""The pages of docs/ that come from the code: `python -m normserve.documentation docs` writes them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from normserve.metrics.exposition import process_up
from normserve.metrics.metrics import Metrics
from normserve.settings import Settings

_SETTINGS = """# Settings

Each setting is read once, at start: from the command line if it is given there, else from the environment, else
the default holds. `normserve serve --help` says the same. Sizes in bytes may have a unit: `512MiB`, `1.5GiB`,
or `2GB` of 1000. A variable that begins with `NORMSERVE_` and is no setting is a warning in the log.

"""

_METRICS = """# Metrics

`GET /metrics` answers in Prometheus' text format, or as OpenMetrics where `Accept` names
`application/openmetrics-text`: then durations have exemplars, the ids of traces
([observability.md](observability.md)). Units are base units; labels come from closed sets, so that
no client can add a series: `op` is an operation, the name of another route, or `__unmatched__`; `pass` is
`forward`, `backward` or `none`; `dtype` is x's; `transport` is `tcp`, `unix`, `local` or
`oip` (below `/v2`, over either; `oip_shm` and
`oip_cuda` where that is about shared memory); `code` is the HTTP
status, 499 where the client left; `key` is the name of an API key, of those that the server has known since its
start.

The rate of `normserve_kernel_bytes_total` over the rate of `normserve_kernel_seconds_total` is the mean
bandwidth of the kernels; over `normserve_device_copy_bandwidth_bytes_per_second` it is the fraction of the roof.
Durations fall into buckets that double from 10 µs to 20 s.

With `--devices`, every process answers for all of them: each series has a label `process` before its own, and
`normserve_process_up` is 1 for the processes that could be asked. What begins with `process_` Linux tells of the
server's process.

"""


def settings_page() -> str:
    """docs/settings.md"""
    rows = [
        (
            f"`--{name.replace('_', '-')}`",
            f"`NORMSERVE_{name.upper()}`",
            _shown(field.default),
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]
    return _SETTINGS + _table(("option", "environment", "default", "meaning"), rows)


def metrics_page() -> str:
    """docs/metrics.md"""
    families = (*Metrics().catalogue, process_up())
    rows = [(f"`{each.name}`", each.kind, ", ".join(each.label_names), each.doc) for each in families]
    return _METRICS + _table(("metric", "kind", "labels", "meaning"), rows)


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def _shown(default: object) -> str:
    return "" if default is None else f"`{default}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
