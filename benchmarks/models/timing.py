"""Wall time of passes that each end with a synchronisation, those of all providers in turn."""

import time
from collections.abc import Callable, Mapping

from benchmarks.harness.timing import Quantiles, quantiles, synchronize, without_collection

CALLS = 3
"""Timed ones of a provider in a round, in which every provider has its turn: what drifts is shared."""

ROUNDS = 8
"""At least."""

MOST_ROUNDS = 40
"""For passes so short that the host's other work shows."""

SECONDS = 1.5
"""Of timed calls of each provider, unless `MOST_ROUNDS` end before."""

_WARMUP = 3


def timed_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, Quantiles]:
    """Quantiles of the calls of each, in milliseconds, after a few more."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with without_collection():
        for done in range(MOST_ROUNDS):
            if done >= ROUNDS and all(sum(of_call) >= SECONDS * 1e3 for of_call in samples.values()):
                break
            for name, call in calls.items():
                samples[name] += (_wall_ms(call) for _ in range(CALLS))
    return {name: quantiles(of_call) for name, of_call in samples.items()}


def _wall_ms(call: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter_ns()
    call()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6
