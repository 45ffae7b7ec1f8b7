"""Queries of benchmarks' CSVs, for the templates.

    {% set models = load_rows("models.csv").where(pass="step", variant="eager") %}
    {{ models.where(layout="vit").compute_ratios("ms_p50", "fusednorm", "torch") | format_range(3) }}

A query that finds nothing, or several values instead of one, is an error: no figure silently uses other rows.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from operator import itemgetter
from statistics import median

from benchmarks.harness import records
from benchmarks.harness.records import CELL, OURS
from benchmarks.report import result_files

RESULTS = result_files.RESULTS

Row = Mapping[str, str]
Values = tuple[Decimal, ...]

_cell: Callable[[Row], tuple[str, ...]] = itemgetter(*CELL)


class QueryError(ValueError):
    """A query has an unexpected result: no rows, several values, or rows of different runs."""


@dataclass(frozen=True)
class CsvRows:
    """Rows of one or several CSVs, and their source."""

    source: str
    rows: tuple[Row, ...]

    def where(self, **columns: str | int | Iterable[str | int]) -> "CsvRows":
        """The rows whose columns have the given values, or one of several given values."""
        kept = self.rows
        for name, values in columns.items():
            texts = _make_texts(values)
            kept = tuple(row for row in kept if row[name] in texts)
        return self._require_rows(kept, columns)

    def like(self, **patterns: str) -> "CsvRows":
        """The rows whose columns fully match the given regular expressions."""
        kept = self.rows
        for name, pattern in patterns.items():
            matches = re.compile(pattern).fullmatch
            kept = tuple(row for row in kept if matches(row[name]))
        return self._require_rows(kept, patterns)

    def between(self, column: str, least: int, most: int) -> "CsvRows":
        """The rows whose integer in a column is between two values, both included."""
        return self._require_rows(
            (row for row in self.rows if row[column] and least <= int(row[column]) <= most), (column, least, most)
        )

    def get_numbers(self, column: str) -> Values:
        """The numbers of a column."""
        return tuple(Decimal(row[column]) for row in self.rows)

    def join_values(self, column: str) -> str:
        """The different values of a column, in order: "d52019e and 4381d9f"."""
        *others, last = dict.fromkeys(row[column] for row in self.rows)
        return f"{', '.join(others)} and {last}" if others else last

    def compute_ratios(self, column: str, provider: str, over: str) -> Values:
        """A provider's number divided by another's in each cell that both computed correctly.

        Raises:
            QueryError: no cell has both, or a cell has rows of two commits.
        """
        return tuple(
            Decimal(upper[column]) / Decimal(lower[column]) for upper, lower in self._pair_rows(provider, over)
        )

    def above(self, column: str, least: int) -> "CsvRows":
        """The rows whose number in a column is greater than `least`."""
        return self._require_rows(
            (row for row in self.rows if Decimal(row[column]) > least), f"{column} above {least}"
        )

    def select_slower(self, column: str, provider: str, over: str) -> "CsvRows":
        """A provider's rows whose number is greater than another's in the same cell."""
        return self._require_rows(
            (
                upper
                for upper, lower in self._pair_rows(provider, over)
                if Decimal(upper[column]) > Decimal(lower[column])
            ),
            f"{provider} slower than {over}",
        )

    def compute_median_ratio(self, column: str, by: str, upper: str, lower: str) -> Values:
        """The median of the rows with `upper` in the column `by`, divided by that of the rows with `lower`."""
        first, second = (median(self.where(**{by: value}).get_numbers(column)) for value in (upper, lower))
        return (first / second,)

    def select_common(self, others: "CsvRows") -> "CsvRows":
        """The rows of cells that `others` have too."""
        cells = {_cell(row) for row in others.rows}
        return self._require_rows((row for row in self.rows if _cell(row) in cells), f"cells of {others.source}")

    def group_by_cell(self) -> list[dict[str, Row]]:
        """Rows by provider, cell by cell; of two rows of one provider the later counts."""
        found: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in self.rows:
            found.setdefault(_cell(row), {})[row["provider"]] = row
        return list(found.values())

    def _pair_rows(self, provider: str, over: str) -> list[tuple[Row, Row]]:
        """The rows of two providers in each cell that both computed correctly, both of one run."""
        pairs = [
            (of_cell[provider], of_cell[over])
            for of_cell in self.group_by_cell()
            if all(name in of_cell and of_cell[name]["ms_p50"] for name in (provider, over))
        ]
        if not pairs:
            raise QueryError(f"{self.source}: no cell has both {provider} and {over}")
        for upper, lower in pairs:
            if upper["commit"] != lower["commit"]:
                cell = " ".join(_cell(upper))
                raise QueryError(f"{self.source}: {provider} and {over} are of two commits in {cell}")
        return pairs

    def _require_rows(self, rows: Iterable[Row], query: object) -> "CsvRows":
        kept = tuple(rows)
        if not kept:
            raise QueryError(f"{self.source} has no row of {query}")
        return CsvRows(self.source, kept)


@dataclass(frozen=True)
class PeerComparison:
    """Ours compared with the best of the others, cell by cell.

    Attributes:
        ahead: the lead of ours, as fractions of a copy, in the cells where no peer is faster.
        behind: the lead of the faster peer, by its name.
        alone: number of cells where no peer was correct.
    """

    ahead: Values
    behind: Mapping[str, Values]
    alone: int

    @property
    def compared(self) -> int:
        """The number of cells with a peer."""
        return len(self.ahead) + self.lost

    @property
    def lost(self) -> int:
        """The number of cells where a peer is faster."""
        return sum(map(len, self.behind.values()))


def compare_with_peers(rows: CsvRows) -> PeerComparison:
    """Ours against the best peer of each cell; ours from the peer's file if that has it."""
    ahead: list[Decimal] = []
    behind: dict[str, list[Decimal]] = {}
    alone = 0
    for of_cell in rows.group_by_cell():
        peers = [row for name, row in of_cell.items() if name not in (OURS, "copy") and row["of_copy"]]
        best = max(peers, key=lambda row: Decimal(row["of_copy"]), default=None)
        if best is None:
            alone += 1
            continue
        lead = Decimal(best["ours"] or of_cell[OURS]["of_copy"]) - Decimal(best["of_copy"])
        (ahead if lead >= 0 else behind.setdefault(best["provider"], [])).append(abs(lead))
    return PeerComparison(tuple(ahead), {name: tuple(values) for name, values in behind.items()}, alone)


def compute_differences(one: CsvRows, other: CsvRows, column: str = "of_copy") -> Values:
    """Ours in the first file minus ours in the second, in each cell that both have."""
    first, second = (
        {_cell(row): Decimal(row[column]) for row in rows.where(provider=OURS).rows} for rows in (one, other)
    )
    differences = tuple(value - second[cell] for cell, value in first.items() if cell in second)
    if not differences:
        raise QueryError(f"{one.source} and {other.source} have no cell of ours in common")
    return differences


@cache
def load_rows(*names: str) -> CsvRows:
    """The rows of files in `benchmarks/results`, as `records.read_records` joins them.

    Rows of row lengths have two additional columns: `cols`, and `sweep`, "1" if x has 256 MiB.
    """
    paths = [RESULTS / name for name in names]
    if len(names) == 1 and not (rows := records.read_csv(paths[0]))[0].keys() >= set(CELL):
        return CsvRows(names[0], tuple(rows))
    return CsvRows(" ".join(names), tuple(_add_length(row) for row in records.read_records(paths)))


def format_single(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The only value."""
    if len(values) != 1:
        raise QueryError(f"one value was meant, not {len(values)}")
    return _format_number(values[0], digits, scale)


def format_median(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The median."""
    return _format_number(median(_require_values(values)), digits, scale)


def format_minimum(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The least value."""
    return _format_number(min(_require_values(values)), digits, scale)


def format_maximum(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The greatest value."""
    return _format_number(max(_require_values(values)), digits, scale)


def format_range(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The range from the least to the greatest; one figure if both have the same text."""
    ends = dict.fromkeys((format_minimum(values, digits, scale), format_maximum(values, digits, scale)))
    return " to ".join(ends)


def format_median_range(values: Values, digits: int = 2, scale: float = 1) -> str:
    """The median, followed by the least and the greatest if their texts differ."""
    inner, ends = format_median(values, digits, scale), format_range(values, digits, scale)
    return inner if ends == inner else f"{inner} ({ends})"


def _require_values(values: Values) -> Values:
    if not values:
        raise QueryError("there is no value")
    return values


def _format_number(value: Decimal, digits: int, scale: float) -> str:
    """A number rounded half away from zero, because the CSV's digits are decimal."""
    return f"{(value * Decimal(str(scale))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def _make_texts(values: str | int | Iterable[str | int]) -> frozenset[str]:
    several = [values] if isinstance(values, str | int) else values
    return frozenset(map(str, several))


def _add_length(row: dict[str, str]) -> Row:
    if row["layout"] != "rows":
        return row | {"cols": "", "sweep": ""}
    return row | {"cols": row["shape"].split("x")[1], "sweep": str(int(records.is_sweep_row(row)))}
