"""Ratios of whole requests are taken within a round, and their median is what counts."""

from benchmarks.serve.server_table import format_table


def row(server: str, size: str, per_second: float, ratio: float) -> dict[str, object]:
    return {"server": server, "size": size, "per_second": per_second, "ours_over_this": ratio}


def test_ours_comes_first_and_the_others_say_how_many_times_theirs_it_is():
    rows = [
        row("echo", "1 MiB", 300, 0.5),
        row("echo", "1 MiB", 100, 0.9),
        row("echo", "1 MiB", 200, 0.8),
        row("normserve", "1 MiB", 150, 1),
        row("normserve", "1 MiB", 90, 1),
        row("normserve", "1 MiB", 160, 1),
    ]
    assert format_table(rows).splitlines() == [
        "| server | 1 MiB |",
        "|---|---|",
        "| normserve | 150/s |",
        "| echo | 200/s, 0.80 (0.50 to 0.90) |",
    ]
