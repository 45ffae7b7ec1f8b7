"""Times of single calls."""

import time
from collections.abc import Callable


def time_calls_s(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each call that is made, one after another, in so many seconds; of at least three."""
    taken: list[float] = []
    began = ended = time.perf_counter()
    while len(taken) < 3 or ended - began < seconds:
        begun = time.perf_counter()
        call()
        ended = time.perf_counter()
        taken.append(ended - begun)
    return taken
