"""The description of an algorithm: lines, each with a kind of call and the sizes that choose it there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.algorithms.limit_search import LONGEST, Walk

ALONE = "programs may not wait"
"""A trait of calls."""

STATISTICS = "statistics for a backward pass"
"""A purpose of a pass."""

Call = tuple[str, ...]
"""A call's value of each of several traits, "" if it has none."""

Ranges = tuple[tuple[int, int], ...]
"""First and last sizes."""

Cell = Mapping[int, Ranges]
"""Sizes by the channels of a group, or by 0."""

Cells = tuple[Cell, Cell]
"""The cells for elements of two bytes, and of four."""


@dataclass(frozen=True, slots=True)
class AlgorithmRule:
    """Sizes that choose an algorithm in calls with at least these traits; for some or all numbers of channels."""

    call: Call
    cells: Cells

    def is_applicable(self, call: Call) -> bool:
        return all(word in ("", had) for word, had in zip(self.call, call, strict=True))


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """One pass, possibly with a purpose.

    Attributes:
        pass_: of `kernel_algorithms.PASSES`.
        purpose: such as `STATISTICS`, or "".
        calls: those whose sizes were searched.
        channels: the numbers of channels that were searched.
        lines: of each chosen algorithm; of those that match a call and its channels, the last one applies.
        text: formats a cell.
    """

    pass_: str
    purpose: str
    calls: Sequence[Call]
    channels: Sequence[int]
    lines: Mapping[str, Sequence[AlgorithmRule]]
    text: Callable[[Cell], str]

    @property
    def reached_algorithms(self) -> list[str]:
        """The algorithms that some size chooses."""
        return [
            name
            for name, lines in self.lines.items()
            if any(ranges for line in lines for cell in line.cells for ranges in cell.values())
        ]

    def find_algorithms(self, call: Call, place: int, channels: int, size: int) -> list[str]:
        """The algorithms in the table for a call; `place`: the index in `Cells`."""
        return [
            name
            for name, lines in self.lines.items()
            if any(first <= size <= last for first, last in _find_ranges(lines, call, place, channels))
        ]


def _find_ranges(lines: Sequence[AlgorithmRule], call: Call, place: int, channels: int) -> Ranges:
    fitting = (line for line in reversed(lines) if line.is_applicable(call) and channels in line.cells[place])
    return next((line.cells[place][channels] for line in fitting), ())


def make_rules(
    calls: Iterable[Call],
    walks: Callable[[Call], tuple[Mapping[int, Walk], Mapping[int, Walk]]],
    *,
    whole_cells: bool = False,
) -> dict[str, list[AlgorithmRule]]:
    """Lines by algorithm, given the walks of each call by channels, with two bytes and with four.

    Args:
        calls: each after those with fewer of its traits.
        whole_cells: a cell has all channels or none; else those to which no earlier line applies.
    """
    found: dict[str, list[AlgorithmRule]] = {}
    for call in calls:
        walked = walks(call)
        of_call = [_group_by_algorithm(each) for each in walked]
        for name in dict.fromkeys((*found, *of_call[0], *of_call[1])):
            lines = found.setdefault(name, [])
            cells = [
                {channels: ranges.get(channels, ()) for channels in each}
                for each, ranges in zip(walked, (each.get(name, {}) for each in of_call), strict=True)
            ]
            changed = [
                {at: ranges for at, ranges in cell.items() if ranges != _find_ranges(lines, call, place, at)}
                for place, cell in enumerate(cells)
            ]
            if any(changed):
                two, four = (
                    cell if change and (whole_cells or len({*cell.values()}) == 1) else change
                    for cell, change in zip(cells, changed, strict=True)
                )
                lines.append(AlgorithmRule(call, (two, four)))
    return found


def _group_by_algorithm(walks: Mapping[int, Walk]) -> dict[str, dict[int, Ranges]]:
    found: dict[str, dict[int, Ranges]] = {}
    for channels, walk in walks.items():
        first = 1
        for last, name in walk:
            if name and first <= last:
                cell = found.setdefault(name, {})
                ranges = [*cell.get(channels, ())]
                _append_range(ranges, first, last)
                cell[channels] = tuple(ranges)
            first = last + 1
    return found


def make_channel_formatter(count: int) -> Callable[[Cell], str]:
    """A function that formats sizes, each with its numbers of channels unless these are all `count`, or 0."""

    def format_cell(cell: Cell) -> str:
        channels_of: dict[Ranges, list[int]] = {}
        for channels, ranges in cell.items():
            channels_of.setdefault(ranges, []).append(channels)
        if len(channels_of) == 1 and (len(cell) == count or () in channels_of):
            return _format_ranges(*channels_of)
        return "; ".join(
            f"{', '.join(map(str, found))}: {_format_ranges(ranges)}" for ranges, found in channels_of.items()
        )

    return format_cell


def make_joint_formatter(count: int) -> Callable[[Cell], str]:
    """A function that formats sizes for all `count` numbers of channels, then those for some, joined if close."""

    def format_cell(cell: Cell) -> str:
        edges = sorted({edge for ranges in cell.values() for first, last in ranges for edge in (first, last + 1)})
        every: list[tuple[int, int]] = []
        some: list[tuple[int, int]] = []
        for first, after in pairwise(edges):
            having = sum(any(start <= first <= end for start, end in ranges) for ranges in cell.values())
            if having == count:
                _append_range(every, first, after - 1)
            elif having:
                _append_range(some, first, after - 1, 2 * some[-1][1] if some else 0)
        every = [each for each in every if not any(first <= each[0] <= last for first, last in some)]
        parts = [_format_ranges(tuple(every))] if every or not some else []
        return ", ".join([*parts, *([f"some {_format_ranges(tuple(some))}"] if some else [])])

    return format_cell


def _append_range(ranges: list[tuple[int, int]], first: int, last: int, reach: int = 0) -> None:
    """Add a range to ascending ones, as one with the last of them if it follows or starts within `reach`."""
    if ranges and first <= max(ranges[-1][1] + 1, reach):
        first, _ = ranges.pop()
    ranges.append((first, last))


def _format_ranges(ranges: Ranges) -> str:
    return ", ".join(_format_range(first, last) for first, last in ranges) or "none"


def _format_range(first: int, last: int) -> str:
    if last == LONGEST:
        return "all" if first == 1 else f"≥ {_format_size(first)}"
    return f"≤ {_format_size(last)}" if first == 1 else f"{_format_size(first)}-{_format_size(last)}"


def _format_size(size: int) -> str:
    """A size in digits; from 2^20 on, powers of two and their neighbours as powers."""
    for offset, suffix in ((0, ""), (1, " - 1"), (-1, " + 1")):
        power = size + offset
        if power >= 1 << 20 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{suffix}"
    return str(size)
