"""How much calls leave behind in memory."""

import gc
import sys
from collections.abc import Callable, Iterable


def assert_bounded(call: Callable[[int], object], most: int) -> None:
    """Assert that no more is remembered of many different calls than of a few more than `most`.

    Args:
        call: makes a call that differs from those with other numbers.
        most: of how many calls something may be remembered.
    """
    call(-1)
    gc.collect()
    before = sys.getallocatedblocks()
    first = _peak(call, range(most + most // 8)) - before
    second = _peak(call, range(2 * most, 4 * most)) - before
    assert first > most // 2, "nothing is remembered: are the calls alike?"
    assert second < 1.4 * first


def _peak(call: Callable[[int], object], numbers: Iterable[int]) -> int:
    """The most blocks of memory that there are at any time."""
    peak = 0
    for number in numbers:
        call(number)
        if number % 16 == 0:
            peak = max(peak, sys.getallocatedblocks())
    return peak
