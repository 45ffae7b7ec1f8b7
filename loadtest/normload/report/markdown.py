"""A run as Markdown, to paste into an issue or a pull request."""

from collections.abc import Sequence

from normload.measurements.result import Result
from normload.report import tables

# Of what a server says about itself; none of it may begin markup or another cell.
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|&"} | {"\n": " ", "\r": " "})


def render(result: Result, outcomes: Sequence[tables.Outcome] = ()) -> str:
    """Return the summary; `outcomes` are the run's objectives."""
    title = f"{result.scenario}: {result.description}" if result.description else result.scenario
    facts = [f"- {name}: {_plain(value)}" for name, value in tables.facts(result).items()]
    remarks = [f"- {_plain(text)}" for text in (*tables.sentences(result), *result.faults, *result.remarks)]
    blocks = [
        [f"**normload {_plain(title)}**"],
        facts,
        _table(tables.OBJECTIVE_HEADINGS, tables.objectives(outcomes)),
        _table(tables.PART_HEADINGS, tables.parts(result)),
        _table(tables.OPERATION_HEADINGS, tables.operations(result)),
        remarks,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    numbers = ["---:"] * (len(headings) - 1)
    return [_row(headings), _row(["---", *numbers]), *(_row([_plain(cell) for cell in row]) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    return text.translate(_MARKUP)
