"""Tables of cases of which `make test` runs a sample; `make test-slow` runs the others."""

from collections.abc import Iterable
from itertools import combinations
from math import gcd
from typing import Any

import pytest


def mark_rest_slow(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[Any]:
    """The cases of a table for `pytest.mark.parametrize`; those that a sample does not need are marked `slow`.

    Args:
        cases: tuples of values, which are told apart by their `repr`.
        together: the sample has every combination of so many values that any case has: 1 is every value, 2 every
            pair.
    """
    table = list(cases)
    seen: set[tuple[tuple[int, str], ...]] = set()
    needed = set()
    # In steps, since neighbours in a table have most values in common.
    steps = range(len(table) * 5 // 8 + 1, 2 * len(table) + 2)
    step = next(step for step in steps if gcd(step, len(table)) == 1)
    for place in (number * step % len(table) for number in range(len(table))):
        new = set(combinations(enumerate(map(repr, table[place])), together)) - seen
        if new:
            needed.add(place)
            seen |= new
    return [
        case if place in needed else pytest.param(*case, marks=pytest.mark.slow) for place, case in enumerate(table)
    ]
