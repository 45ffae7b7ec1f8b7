"""Walks over sizes: up to which one an algorithm is chosen, searched for between the points of a grid."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise

LONGEST = (1 << 30) - 1
"""The last size of a walk."""

Sizes = Callable[[int], int]
"""The size with a number, from 1 on; ascending, and none below its number."""

Walk = list[tuple[int, str]]
"""Last sizes, ascending, and what is chosen up to each; that of the last one is LONGEST."""


def whole(step: int) -> Sizes:
    """Multiples of `step`."""
    return lambda number: number * step


def ragged(vector: int, step: int = 1) -> Sizes:
    """`step` times each number from 2 on that is no multiple of `vector`."""
    return lambda number: (number + 1 + number // (vector - 1)) * step


def octaves(points: int, last: int) -> list[int]:
    """As many points in each octave up to the one that ends with `last`, a power of two."""
    return [
        (points + point) << power for power in range((last // points).bit_length() - 1) for point in range(points)
    ]


def walk(sizes: Sizes, grid: Iterable[int], choose: Callable[[int], str], slack: int = 0) -> Walk:
    """What `choose` says of sizes, by their numbers.

    What is chosen between two neighbours of the grid may escape where both agree.

    Args:
        grid: sizes; powers of two from 2^4 to 2^24 are added.
        slack: by which a limit may be too high.
    """
    count = _number(sizes, LONGEST)
    numbers = {_number(sizes, size) for size in (*grid, *(1 << power for power in range(4, 25)))}
    points = [(number, choose(number)) for number in sorted({1, count, *numbers} - {0})]
    found: Walk = []

    def search(first: tuple[int, str], last: tuple[int, str]) -> None:
        if first[1] == last[1]:
            return
        if last[0] - first[0] == 1:
            found.append((_roundest(sizes(first[0]), sizes(last[0]) - 1 + slack), first[1]))
            return
        number = (first[0] + last[0]) // 2
        middle = number, choose(number)
        search(first, middle)
        search(middle, last)

    for first, last in pairwise(points):
        search(first, last)
    return [*found, (LONGEST, points[-1][1])]


def _number(sizes: Sizes, most: int) -> int:
    """Of the last size up to `most`, 0 if there is none."""
    return bisect_right(range(1, most + 1), most, key=sizes)


def _roundest(first: int, last: int) -> int:
    """The number from first to last that the highest power of two divides: any of them is the same limit."""
    power = next(power for power in reversed(range(last.bit_length())) if last >> power << power >= first)
    return last >> power << power
