"""A timer that needs no device."""

from benchmarks.harness.timing import TimeQuantiles


class Timer:
    """A millisecond for the first call, and one less in a hundred for each that follows."""

    def __init__(self):
        self._ms = 1.0

    def __call__(self, call, repeats=30, warmup=3):
        call()
        now, self._ms = self._ms, 0.99 * self._ms
        return TimeQuantiles(now, now, now)
