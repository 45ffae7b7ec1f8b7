"""The tables as Markdown, and their place in a page between two comments."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.algorithms import group_norm_tables, layer_norm_tables
from benchmarks.algorithms.algorithm_rules import STATISTICS, AlgorithmRule, AlgorithmTable
from benchmarks.algorithms.kernel_algorithms import PASSES, REFUSED, PassAlgorithm, list_algorithms
from benchmarks.algorithms.limit_search import LONGEST
from benchmarks.fingerprints.group_norm_cases import GROUPS

BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
"""The comments, each on a separate line."""

UNREACHED = "**no shape chooses it**"

_INTRODUCTION = f"""\
What a device of 132 multiprocessors gets, for sizes from 1 to 2^{LONGEST.bit_length()} - 1.

To find out which sizes choose an algorithm for a call:

1. Take the algorithm's lines whose every word is true of the call; “anything” is true of all calls. A call with
   “{layer_norm_tables.FLOAT8}”, or one that computes “{STATISTICS}” because the caller has none, takes only
   lines that say so.
2. Of these, read the last one with an entry in the column of x's dtype, and no other; where entries begin with
   numbers of channels, the last one that has the call's number. “none” is an entry (no size), an empty cell is not.

GroupNorm's forward passes with another residual, with dropout alone or with gelu take fewer registers than those
with “a float32 residual and dropout”: their limits lie between the lines with and without this.
"""

_TITLES = {
    "layer_norm.forward": "LayerNorm and RMSNorm, forward: columns",
    "layer_norm.backward": "LayerNorm and RMSNorm, backward: columns",
    "layer_norm.chain": "Chains of LayerNorm and RMSNorm: columns",
    "layer_norm.channels_first.forward": "LayerNorm and RMSNorm over channels, contiguous, forward: channels",
    "layer_norm.channels_first.backward": "LayerNorm and RMSNorm over channels, contiguous, backward: channels",
    "group_norm.contiguous.forward": "GroupNorm, contiguous, forward: elements of a group, to within 8",
    "group_norm.contiguous.backward": "GroupNorm, contiguous, backward: elements of a group, to within 8; "
    "“some” where it depends on how many channels these are",
    "group_norm.channels_last.forward": "GroupNorm, channels-last, forward: channels of one of "
    f"{GROUPS} groups, and positions",
    "group_norm.channels_last.backward": "GroupNorm, channels-last, backward: channels of one of "
    f"{GROUPS} groups, and positions",
}

_HEAD = "| algorithm | calls with | 16-bit x | float32 x |\n|---|---|---|---|\n"

_SHAPES = f"shapes of the benchmarks, in {GROUPS} groups where not said"


class AlgorithmPage:
    """All tables.

    Attributes:
        tables: one for each pass and purpose.
        chosen: the algorithms that some size chooses.
        unreached: the algorithms that no size chooses.
        text: in Markdown.
    """

    tables: list[AlgorithmTable]
    chosen: set[PassAlgorithm]
    unreached: list[PassAlgorithm]
    text: str

    def __init__(self) -> None:
        self.tables = tables = [*layer_norm_tables.make_pass_tables(), *group_norm_tables.make_pass_tables()]
        shapes = list(group_norm_tables.iterate_benchmark_shapes())
        self.chosen = {PassAlgorithm(table.pass_, name) for table in tables for name in table.reached_algorithms}
        self.unreached = [algorithm for algorithm in list_algorithms() if algorithm not in self.chosen]
        parts = [_INTRODUCTION]
        for pass_ in PASSES:
            of_pass = [table for table in tables if table.pass_ == pass_]
            names = [
                each.name for each in (*list_algorithms(), PassAlgorithm(pass_, REFUSED)) if each.pass_ == pass_
            ]
            rows = [row for name in names for row in _iterate_rows(PassAlgorithm(pass_, name), of_pass, shapes)]
            parts.append(f"#### {_TITLES[pass_]}\n\n{_HEAD}{''.join(rows)}")
        self.text = "\n".join(parts)


def _iterate_rows(
    algorithm: PassAlgorithm, tables: Iterable[AlgorithmTable], shapes: Sequence[tuple[PassAlgorithm, int, str]]
) -> Iterator[str]:
    rows = [row for table in tables for row in _iterate_rules(table, table.lines.get(algorithm.name, ()))]
    two, four = (
        ", ".join(text for each, size, text in shapes if (each, size) == (algorithm, itemsize))
        for itemsize in (2, 4)
    )
    if two or four:
        rows.append((_SHAPES, two, four))
    if not rows and algorithm.name != REFUSED:
        rows.append((UNREACHED, "", ""))
    for number, row in enumerate(rows):
        yield "| " + " | ".join((algorithm.name if number == 0 else "", *row)) + " |\n"


def _iterate_rules(table: AlgorithmTable, lines: Iterable[AlgorithmRule]) -> Iterator[tuple[str, str, str]]:
    """The lines without those that repeat an earlier one for the same calls."""
    shown: list[tuple[AlgorithmRule, tuple[str, str]]] = []
    for line in lines:
        two, four = map(table.text, line.cells)
        before = next((texts for other, texts in reversed(shown) if other.is_applicable(line.call)), None)
        if before != (two, four):
            shown.append((line, (two, four)))
            yield _format_traits(table, line), two, four


def _format_traits(table: AlgorithmTable, line: AlgorithmRule) -> str:
    words = [word for word in line.call if word]
    if table.purpose:
        return f"{table.purpose}: {', '.join(words)}" if words else table.purpose
    return ", ".join(words) or "anything"


def insert_tables(page: str, text: str) -> str:
    """A page with `text` between the comments.

    Raises:
        ValueError: the page does not contain each of them once.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"the page lacks the lines {BEGIN} and {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"
