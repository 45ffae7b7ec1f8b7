"""A run as Markdown, to paste into an issue or a pull request."""

from collections.abc import Sequence

from normload.measurements.result import Result
from normload.report import tables


def render(result: Result, outcomes: Sequence[tables.Outcome] = ()) -> str:
    """Return the summary; `outcomes` are the results of its objectives."""
    title = f"{result.scenario}: {result.description}" if result.description else result.scenario
    facts = [f"- {name}: {tables.plain(value)}" for name, value in tables.facts(result).items()]
    remarks = [f"- {tables.plain(text)}" for text in (*tables.sentences(result), *result.faults, *result.remarks)]
    blocks = [
        [f"**normload {tables.plain(title)}**"],
        facts,
        tables.markdown_table(tables.OBJECTIVE_HEADINGS, tables.objectives(outcomes)),
        tables.markdown_table(tables.PART_HEADINGS, tables.parts(result)),
        tables.markdown_table(tables.OPERATION_HEADINGS, tables.operations(result)),
        remarks,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
