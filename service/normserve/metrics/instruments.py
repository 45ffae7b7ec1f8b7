"""Counters, gauges and histograms with minimal cost per update.

A request updates about twenty of them.  Those of prometheus_client take a lock and look up the child each time,
which costs a tenth of a small request's time; these belong to one thread, the event loop's, which also reads them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

# Up to here one by one is quicker.
_FEW = 8


class Counter:
    """A sum that only grows."""

    __slots__ = ("value",)
    kind: ClassVar = "counter"

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to the sum."""
        self.value += amount


class Gauge:
    """A value that can rise and fall."""

    __slots__ = ("value",)
    kind: ClassVar = "gauge"

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = float(value)


class Exemplar(NamedTuple):
    """A value that a histogram has counted, with the trace of its request.

    Attributes:
        trace_id: 32 hexadecimal digits.
        observed: seconds since 1970.
    """

    trace_id: str
    value: float
    observed: float


class Histogram:
    """The numbers of counted values in each bucket, and the sum of the values.

    Attributes:
        counts: of each bucket by itself, the last one beyond every bound.
        exemplars: the last of each bucket that has one, by the bucket's index.
    """

    __slots__ = ("bounds", "counts", "exemplars", "sum")
    kind: ClassVar = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, values: Sequence[float]) -> None:
        """Count many values at once, which is faster than as many calls of `observe`."""
        if len(values) < _FEW:
            for value in values:
                self.observe(value)
            return
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [before + more for before, more in zip(self.counts, found.tolist(), strict=True)]
        self.sum += sum(values)

    def attach_exemplar(self, exemplar: Exemplar) -> None:
        """Attach a counted value to its bucket, as an exemplar."""
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar

    def iterate_cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield each bound, infinity the last, with the number of values up to it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield bound, total


_I = TypeVar("_I", bound=Counter | Gauge | Histogram, covariant=True)


class MetricFamily(Generic[_I]):
    """All series of one metric: an instrument, such as a counter, for each combination of label values.

    A call with label values returns their instrument, and creates it if it is new.

    A family without labels has its instrument from the start.
    """

    def __init__(self, name: str, doc: str, labels: Sequence[str], make: Callable[[], _I]) -> None:
        self.name, self.help_text, self.label_names = name, doc, tuple(labels)
        self.kind: str = make().kind
        self._make_instrument = make
        self.instruments: dict[tuple[str, ...], _I] = {} if labels else {(): make()}

    def __call__(self, *values: str) -> _I:
        """Return the instrument of these label values, which is created at the first call."""
        member = self.instruments.get(values)
        if member is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has the labels {self.label_names}, got {values}")
            member = self.instruments[values] = self._make_instrument()
        return member
