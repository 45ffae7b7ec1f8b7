"""Modules of the service beside those in process: the table."""

from benchmarks.serve.callers.modules import format_table


def row(rows, module, p50, ratio):
    return {"rows": rows, "module": module, "p50_ms": p50, "over_fusednorm": ratio}


def test_table_has_medians_over_rounds_in_the_order_of_the_rows():
    rows = [row(16, "b", p50, ratio) for p50, ratio in (("1.0", "3.0"), ("5.0", "2.0"), ("2.0", "9.0"))]
    rows += [row(16, "a", "1.0", "1.0"), row(32, "b", "4.0", "1.5")]
    assert format_table(rows).splitlines()[2:] == [
        "| 16 | b | 2 | 3 |",
        "| 16 | a | 1 | 1 |",
        "| 32 | b | 4 | 1.5 |",
    ]
