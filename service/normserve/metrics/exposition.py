"""Conversion of metrics to the Prometheus text format, for one process or several.

A scrape runs on the event loop and delays all requests: prometheus_client's writer takes some 20 ms for a server
that has seen every operation, this one takes 1 ms.

Metrics are rendered and merged as Prometheus text with exemplars after the buckets, which that format does not
have; `strip_exemplars` and `convert_to_open_metrics` convert it to the format that a scraper accepts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from normserve.metrics.instruments import Counter, Exemplar, Gauge, Histogram, MetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_METRICS_CONTENT_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"

# No label's value looks so: its quotation marks are escaped.
_EXEMPLAR = re.compile(rb' # \{trace_id="[^\n]*')
_COUNTER = re.compile(rb"# HELP (\w+)_total ([^\n]*\n)# TYPE \1_total counter\n")

AnyFamily = MetricFamily[Counter | Gauge | Histogram]


class TextExposition:
    """A renderer of metric families as Prometheus text, which formats the names and labels of each series
    only once.
    """

    def __init__(self, families: Sequence[AnyFamily], constant: Mapping[str, str]) -> None:
        """Args: constant: labels that precede every series' own."""
        self._families = families
        self._constant_labels = constant
        self._series_names: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def render(self) -> bytes:
        """Render the current values of all families."""
        return "".join(part for family in self._families for part in self._render_family(family)).encode()

    def _render_family(self, family: AnyFamily) -> Iterator[str]:
        """Yield the lines of one metric family: its help and type, then the current value of each series.

        Buckets of histograms are followed by their exemplars.
        """
        doc = family.help_text.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {family.name} {doc}\n# TYPE {family.name} {family.kind}\n"
        for labels, instrument in family.instruments.items():
            heads = self._series_names.get((family.name, labels))
            if heads is None:
                heads = self._series_names[family.name, labels] = self._make_series_names(
                    family, labels, instrument
                )
            if isinstance(instrument, Histogram):
                counts = [count for _, count in instrument.iterate_cumulative()]
                values = (*counts, counts[-1], instrument.sum)
                shown = instrument.exemplars
                if not shown:
                    yield "".join([f"{head} {value}\n" for head, value in zip(heads, values, strict=True)])
                    continue
                for place, (head, value) in enumerate(zip(heads, values, strict=True)):
                    yield f"{head} {value}{_format_exemplar(shown.get(place))}\n"
            else:
                yield f"{heads[0]} {_format_number(instrument.value)}\n"

    def _make_series_names(
        self, family: AnyFamily, labels: tuple[str, ...], instrument: Counter | Gauge | Histogram
    ) -> list[str]:
        """Format the name and labels of each line of an instrument: one line, or a histogram's buckets, count
        and sum.
        """
        named = {**self._constant_labels, **dict(zip(family.label_names, labels, strict=True))}
        if not isinstance(instrument, Histogram):
            return [_format_series_name(family.name, named)]
        bounds = [_format_number(bound) for bound, _ in instrument.iterate_cumulative()]
        buckets = [_format_series_name(f"{family.name}_bucket", {**named, "le": bound}) for bound in bounds]
        return [
            *buckets,
            _format_series_name(f"{family.name}_count", named),
            _format_series_name(f"{family.name}_sum", named),
        ]


def strip_exemplars(text: bytes) -> bytes:
    """Convert a rendered text to Prometheus' text format, which has no exemplars."""
    return _EXEMPLAR.sub(b"", text)


def convert_to_open_metrics(text: bytes) -> bytes:
    """Convert a rendered text to OpenMetrics: counters' families lose the suffix `_total`, and an end
    marker is appended.
    """
    return _COUNTER.sub(rb"# HELP \1 \2# TYPE \1 counter\n", text) + b"# EOF\n"


def make_process_up_family() -> MetricFamily[Gauge]:
    """Make the metric of which processes of a fleet respond."""
    doc = "1 for each process of --devices that responds."
    return MetricFamily("normserve_process_up", doc, ("process",), Gauge)


def merge_expositions(texts: Mapping[str, bytes], expected: Iterable[str]) -> bytes:
    """Merge the rendered metrics of several processes.  Also add a metric that shows for each expected process
    whether it answered.

    The series of each process have a label with its name.

    Args:
        texts: by the names of the processes that answered.
        expected: the names of all processes of the fleet.
    """
    families: dict[bytes, list[bytes]] = {}
    for _, text in sorted(texts.items()):
        for block in text.split(b"# HELP ")[1:]:
            doc, kind, series = block.split(b"\n", 2)
            families.setdefault(b"# HELP %b\n%b\n" % (doc, kind), []).append(series)
    up = make_process_up_family()
    for name in expected:
        up(name).set(name in texts)
    merged_parts = [part for head, series in families.items() for part in (head, *series)]
    return b"".join([*merged_parts, TextExposition([up], {}).render()])


def _format_series_name(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join([f'{label}="{_escape_label(value)}"' for label, value in labels.items()])
    return f"{name}{{{pairs}}}" if pairs else name


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _format_exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    return f' # {{trace_id="{exemplar.trace_id}"}} {exemplar.value!r} {exemplar.observed:.3f}'


def _format_number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
