"""The metrics of prepared calls."""

from typing import NamedTuple

from normserve.metrics.instruments import Counter
from normserve.metrics.registry import MetricRegistry

#: The kinds of owners of prepared calls.
OWNERS = ("process", "connection")


class PreparedCallCounters(NamedTuple):
    """The counters of one or more caches of prepared calls.  A prepared call is a request that was parsed and
    planned before, and need only be computed.

    One set counts for the process's cache, one for those of all connections.

    Attributes:
        hits, misses: look-ups.
        evictions: entries that were discarded because there were too many bytes.
    """

    hits: Counter
    misses: Counter
    evictions: Counter


class PreparedCallMetrics:
    """The metrics of the caches of prepared calls.  A prepared call is a request that was parsed and planned
    before.
    """

    def __init__(self, make: MetricRegistry) -> None:
        self._events = make.add_counter(
            "prepared_calls_total",
            "Prepared calls that were found (hit), not found (miss), or discarded to limit their memory (evicted), "
            "in the process's memory of them or in those of connections that share memory with the server.",
            ("owner", "event"),
        )
        for owner in OWNERS:
            self.get_counters(owner)

    def get_counters(self, owner: str) -> PreparedCallCounters:
        """Return the counters for the caches of one of `OWNERS`, the process or its connections."""
        return PreparedCallCounters(*[self._events(owner, event) for event in ("hit", "miss", "evicted")])
