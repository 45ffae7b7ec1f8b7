"""Searches over sizes for the limits up to which an algorithm is chosen, between the points of a grid."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise

LONGEST = (1 << 29) - 1
"""The largest size of a search: larger samples may need more programs than a grid can have."""

Sizes = Callable[[int], int]
"""The size with an index, from 1 on; ascending, and none is smaller than its index."""

Walk = list[tuple[int, str]]
"""Limits, ascending, and the choice up to each; the last limit is LONGEST."""


def count_from_two(number: int) -> int:
    """Each number from 2 on: channels or positions that are one are in either layout."""
    return number + 1


def make_multiples(step: int) -> Sizes:
    """Multiples of `step`."""
    return lambda number: number * step


def make_non_multiples(vector: int, step: int = 1) -> Sizes:
    """`step` times each number from 2 on that is not a multiple of `vector`."""
    return lambda number: (number + 1 + number // (vector - 1)) * step


def list_octave_sizes(points: int, last: int) -> list[int]:
    """`points` sizes in each octave, up to the octave that ends with `last`, a power of two."""
    return [
        (points + point) << power for power in range((last // points).bit_length() - 1) for point in range(points)
    ]


def search_limits(sizes: Sizes, grid: Iterable[int], choose: Callable[[int], str], slack: int = 0) -> Walk:
    """The results of `choose` for all sizes.

    If two neighbours of the grid agree, another choice between them is not found.

    Args:
        grid: sizes; powers of two from 2^4 to 2^24 are added.
        slack: how much too high a limit may be.
    """
    count = _count_sizes(sizes, LONGEST)
    numbers = {_count_sizes(sizes, size) for size in (*grid, *(1 << power for power in range(4, 25)))}
    points = [(number, choose(number)) for number in sorted({1, count, *numbers} - {0})]
    found: Walk = []

    def search_between(first: tuple[int, str], last: tuple[int, str]) -> None:
        if first[1] == last[1]:
            return
        if last[0] - first[0] == 1:
            found.append((_choose_roundest(sizes(first[0]), sizes(last[0]) - 1 + slack), first[1]))
            return
        number = (first[0] + last[0]) // 2
        middle = number, choose(number)
        search_between(first, middle)
        search_between(middle, last)

    for first, last in pairwise(points):
        search_between(first, last)
    return [*found, (LONGEST, points[-1][1])]


def _count_sizes(sizes: Sizes, most: int) -> int:
    """The index of the last size up to `most`, 0 if there is none."""
    return bisect_right(range(1, most + 1), most, key=sizes)


def _choose_roundest(first: int, last: int) -> int:
    """The number from first to last with the most factors of two: all of them are the same limit."""
    power = next(power for power in reversed(range(last.bit_length())) if last >> power << power >= first)
    return last >> power << power
