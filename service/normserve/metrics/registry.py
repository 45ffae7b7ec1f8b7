"""The metric families, with the server's prefix and in the order of their creation."""

import functools
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client.metrics_core import Metric

from normserve.metrics.exposition import AnyFamily
from normserve.metrics.instruments import Counter, Gauge, Histogram, MetricFamily

_I = TypeVar("_I", Counter, Gauge, Histogram)

KERNEL_LABELS = ("op", "pass", "dtype")

COUNTED_AT_ONCE = 64
"""The number of ended requests or launches that are counted together: most are alike, and for a histogram many
values take little longer than one.
"""


class MetricRegistry:
    """A factory of metric families, which keeps them in the order of their creation and prefixes their names."""

    def __init__(self) -> None:
        self.families: list[AnyFamily] = []

    def add_counter(self, name: str, doc: str, labels: Sequence[str]) -> MetricFamily[Counter]:
        return self._add(MetricFamily(f"normserve_{name}", doc, labels, Counter))

    def add_gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> MetricFamily[Gauge]:
        return self._add(MetricFamily(f"normserve_{name}", doc, labels, Gauge))

    def add_histogram(
        self, name: str, doc: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> MetricFamily[Histogram]:
        return self._add(MetricFamily(f"normserve_{name}", doc, labels, functools.partial(Histogram, buckets)))

    def add_process_metric(self, metric: Metric) -> MetricFamily[Counter] | MetricFamily[Gauge]:
        """Add a family for a metric of the process that prometheus_client measures, under that library's name
        for it.
        """
        name, doc = metric.samples[0].name, metric.documentation
        if metric.type == "counter":
            return self._add(MetricFamily(name, doc, (), Counter))
        return self._add(MetricFamily(name, doc, (), Gauge))

    def _add(self, family: MetricFamily[_I]) -> MetricFamily[_I]:
        self.families.append(family)
        return family
