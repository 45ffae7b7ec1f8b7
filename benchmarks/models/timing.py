"""Wall time of passes, each with a synchronisation at its end; providers take turns."""

import time
from collections.abc import Callable, Mapping

from benchmarks.harness.timing import TimeQuantiles, compute_quantiles, disable_garbage_collection, synchronize

CALLS = 3
"""Timed calls of a provider per round; every provider has a turn in each round, so that drift affects all."""

ROUNDS = 8
"""Minimum number of rounds."""

MOST_ROUNDS = 40
"""Maximum, for passes so short that other work of the host affects them."""

SECONDS = 1.5
"""Time of the timed calls of each provider, unless `MOST_ROUNDS` are reached before."""

_WARMUP = 3


def time_in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, TimeQuantiles]:
    """Quantiles of each one's calls, in milliseconds, after a few warm-up calls."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with disable_garbage_collection():
        for done in range(MOST_ROUNDS):
            if done >= ROUNDS and all(sum(of_call) >= SECONDS * 1e3 for of_call in samples.values()):
                break
            for name, call in calls.items():
                samples[name] += (_measure_wall_ms(call) for _ in range(CALLS))
    return {name: compute_quantiles(of_call) for name, of_call in samples.items()}


def _measure_wall_ms(call: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter_ns()
    call()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6
