"""From what is counted to what Prometheus reads, of one process or of a fleet."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from normserve.instruments import Counter, Family, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counters(Collector):
    """A family of counters as Prometheus wants it."""

    def __init__(self, family: Family[Counter]) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        told = CounterMetricFamily(self._family.name, self._family.doc, labels=self._family.label_names)
        for labels, counter in self._family.members.items():
            told.add_metric(labels, counter.value)
        yield told


class Histograms(Collector):
    """A family of histograms as Prometheus wants it."""

    def __init__(self, family: Family[Histogram]) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        told = HistogramMetricFamily(self._family.name, self._family.doc, labels=self._family.label_names)
        for labels, histogram in self._family.members.items():
            buckets = [(_bound(bound), count) for bound, count in histogram.cumulative()]
            told.add_metric(labels, buckets, histogram.sum)
        yield told


class _Merged(Collector):
    """The metrics of several processes, told apart by a label."""

    def __init__(self, texts: Mapping[int, bytes], count: int) -> None:
        self._texts = texts
        self._count = count

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for index, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [
                    sample._replace(labels={**sample.labels, "process": str(index)}) for sample in family.samples
                ]
        yield from families.values()
        up = GaugeMetricFamily(
            "normserve_process_up", "1 for each process of a fleet that answers.", labels=("process",)
        )
        for index in range(self._count):
            up.add_metric([str(index)], int(index in self._texts))
        yield up


def merged(texts: Mapping[int, bytes], count: int) -> bytes:
    """The Prometheus text of a fleet of `count` processes from those that answered, by index."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts, count))
    return generate_latest(registry)


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)
