"""A run as Markdown, to paste into an issue or a pull request."""

from collections.abc import Sequence

from normload.measurements.result import RunResult
from normload.report import tables


def render_markdown(result: RunResult, outcomes: Sequence[tables.Outcome] = ()) -> str:
    """Render the summary; `outcomes` are the results of its objectives."""
    title = f"{result.scenario}: {result.description}" if result.description else result.scenario
    facts = [f"- {name}: {tables.escape_markdown(value)}" for name, value in tables.list_facts(result).items()]
    remarks = [
        f"- {tables.escape_markdown(text)}"
        for text in (*tables.list_sentences(result), *result.faults, *result.remarks)
    ]
    blocks = [
        [f"**normload {tables.escape_markdown(title)}**"],
        facts,
        tables.make_markdown_table(tables.OBJECTIVE_HEADINGS, tables.make_objective_rows(outcomes)),
        tables.make_markdown_table(tables.PART_HEADINGS, tables.make_phase_rows(result)),
        tables.make_markdown_table(tables.OPERATION_HEADINGS, tables.make_operation_rows(result)),
        remarks,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
