"""A run as Markdown, to paste into an issue or a pull request."""

from collections.abc import Sequence

from normload.measurements.results import RunResult
from normload.report import report_tables


def render_markdown(result: RunResult, outcomes: Sequence[report_tables.Outcome] = ()) -> str:
    """Render the summary; `outcomes` are the results of its objectives."""
    title = f"{result.scenario}: {result.description}" if result.description else result.scenario
    facts = [
        f"- {name}: {report_tables.escape_markdown(value)}"
        for name, value in report_tables.list_facts(result).items()
    ]
    remarks = [
        f"- {report_tables.escape_markdown(text)}"
        for text in (*report_tables.list_sentences(result), *result.faults, *result.remarks)
    ]
    blocks = [
        [f"**normload {report_tables.escape_markdown(title)}**"],
        facts,
        report_tables.make_markdown_table(
            report_tables.OBJECTIVE_HEADINGS, report_tables.make_objective_rows(outcomes)
        ),
        report_tables.make_markdown_table(report_tables.PART_HEADINGS, report_tables.make_phase_rows(result)),
        report_tables.make_markdown_table(
            report_tables.OPERATION_HEADINGS, report_tables.make_operation_rows(result)
        ),
        remarks,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
