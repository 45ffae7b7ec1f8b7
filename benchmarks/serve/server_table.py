"""The rows of a run as a Markdown table."""

from collections.abc import Iterable, Mapping
from statistics import median

OURS = "normserve"


def format_table(rows: Iterable[Mapping[str, object]]) -> str:
    """A line for each server: responses per second, and ours as a multiple; medians over the rounds."""
    rows = list(rows)
    sizes = list(dict.fromkeys(str(row["size"]) for row in rows))
    lines = ["| server | " + " | ".join(sizes) + " |", "|---|" + "---|" * len(sizes)]
    for server in dict.fromkeys(
        str(row["server"]) for row in sorted(rows, key=lambda row: str(row["server"]) != OURS)
    ):
        cells = [
            _format_cell([row for row in rows if (row["server"], row["size"]) == (server, size)]) for size in sizes
        ]
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_cell(rows: list[Mapping[str, object]]) -> str:
    def get_numbers(column: str) -> list[float]:
        return [float(str(row[column])) for row in rows]

    per_second, ratios = median(get_numbers("per_second")), get_numbers("ours_over_this")
    if rows[0]["server"] == OURS:
        return f"{per_second:.4g}/s"
    return f"{per_second:.4g}/s, {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
