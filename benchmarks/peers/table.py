"""The rows of a comparison as a Markdown table."""

from collections.abc import Iterable, Mapping
from statistics import median

OURS = "normserve"


def format_table(rows: Iterable[Mapping[str, object]]) -> str:
    """A line for each server; a column for each size and number of connections.

    Responses per second, medians over the rounds; after a comma, normserve's as a multiple.
    """
    rows = list(rows)
    columns = list(dict.fromkeys((str(row["size"]), str(row["connections"])) for row in rows))
    headings = [f"{size}, {count}" for size, count in columns]
    lines = ["| server | " + " | ".join(headings) + " |", "|---|" + "---|" * len(columns)]
    ours = {column: _compute_rate(rows, OURS, column) for column in columns}
    for server in dict.fromkeys(str(row["server"]) for row in sorted(rows, key=lambda row: row["server"] != OURS)):
        cells = []
        for column in columns:
            theirs = _compute_rate(rows, server, column)
            ratio = "" if server == OURS else f", {ours[column] / theirs:.2f}" if theirs else ", -"
            cells.append(f"{theirs:.4g}/s{ratio}")
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    wrong = sorted({str(row["server"]) for row in rows if int(str(row["wrong"]))})
    if wrong:
        lines += ["", f"Wrong answers came from {', '.join(wrong)}."]
    return "\n".join(lines)


def _compute_rate(rows: Iterable[Mapping[str, object]], server: str, column: tuple[str, str]) -> float:
    return median(
        float(str(row["per_second"]))
        for row in rows
        if (str(row["server"]), str(row["size"]), str(row["connections"])) == (server, *column)
    )
