"""Wall time of passes that each end with a synchronisation, those of all providers in turn."""

import time
from collections.abc import Callable, Mapping

from benchmarks.harness.timing import Quantiles, quantiles, synchronize, without_collection

ROUNDS = 4
"""In each of which every provider is timed; what drifts is shared."""

CALLS = 6
"""Timed ones in a round."""

_WARMUP = 3


def timed_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, Quantiles]:
    """Quantiles of `ROUNDS * CALLS` calls of each, in milliseconds, after a few more."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with without_collection():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                samples[name] += (_wall_ms(call) for _ in range(CALLS))
    return {name: quantiles(of_call) for name, of_call in samples.items()}


def _wall_ms(call: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter_ns()
    call()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6
