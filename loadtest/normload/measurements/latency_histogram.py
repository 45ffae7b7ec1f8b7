"""Latencies in bounded memory: counts in buckets whose width grows with the value.

The layout is HdrHistogram's: linear within each power of two, so that the error of a value is below 1 % from
100 ns to hours, and histograms of several processes can be added.

Source: G. Tene, http://hdrhistogram.org.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

UNIT_S = 1e-7

# 2^8 values are counted one by one; above, each power of two has 2^7 buckets.
_LINEAR_BITS = 8
_HALF = 1 << (_LINEAR_BITS - 1)
# 2^38 units are seven hours.
_BUCKETS = _HALF * (38 - _LINEAR_BITS + 2)


class LatencyHistogram:
    """A histogram of latencies, with their exact sum and maximum."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)
        self.sum_s = 0.0
        self.max_s = 0.0

    @property
    def count(self) -> int:
        """The number of latencies."""
        return int(self._counts.sum())

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of latencies in each bucket."""
        return self._counts

    @property
    def mean_s(self) -> float:
        """The mean; NaN without latencies."""
        return self.sum_s / self.count if self.count else math.nan

    def add_seconds(self, seconds: Sequence[float]) -> None:
        """Add latencies in seconds, none of them negative."""
        if not seconds:
            return
        values = np.asarray(seconds, np.float64)
        units = np.rint(values / UNIT_S).astype(np.int64)
        exponents = np.frexp(np.maximum(units, 1).astype(np.float64))[1]
        shifts = np.maximum(exponents - _LINEAR_BITS, 0)
        buckets = np.minimum(_HALF * shifts + (units >> shifts), _BUCKETS - 1)
        self._counts += np.bincount(buckets, minlength=_BUCKETS)
        self.sum_s += float(values.sum())
        self.max_s = max(self.max_s, float(values.max()))

    def merge(self, other: "LatencyHistogram", times: int = 1) -> None:
        """Add the counts of another histogram, each multiplied by `times`."""
        self._counts += other._counts * times
        self.sum_s += other.sum_s * times
        self.max_s = max(self.max_s, other.max_s)

    def compute_percentile_s(self, percent: float) -> float:
        """Compute the latency in seconds that `percent` of all latencies do not exceed; NaN without latencies.

        It is the upper end of a bucket, but at most the maximum.
        """
        total = self.count
        if not total:
            return math.nan
        # Without the rounding, 99.9 % of 1000 is 999.0000000000001.
        rank = max(1, math.ceil(round(total * percent / 100, 6)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(float(compute_upper_bounds_s(np.asarray([bucket]))[0]), self.max_s)

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON document: the numbers and counts of the buckets that are not empty, sum and maximum."""
        (filled,) = np.nonzero(self._counts)
        counts = self._counts[filled]
        return {"buckets": filled.tolist(), "counts": counts.tolist(), "sum_s": self.sum_s, "max_s": self.max_s}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Make a histogram from a document of `to_json`."""
        made = cls()
        made._counts[np.asarray(document["buckets"], np.int64)] = document["counts"]
        made.sum_s, made.max_s = float(document["sum_s"]), float(document["max_s"])
        return made


def compute_upper_bounds_s(buckets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute the upper bound of each of these buckets: the largest latency, in seconds, that it counts.

    Args: buckets: numbers of buckets.
    """
    shifts = np.maximum(0, buckets // _HALF - 1)
    uppers: NDArray[np.float64] = (((buckets - _HALF * shifts + 1) << shifts) - 0.5) * UNIT_S
    return uppers
