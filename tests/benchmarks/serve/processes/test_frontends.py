"""Front ends beside none: the table."""

from benchmarks.serve.processes.frontends import format_table


def row(front_ends, rate, ratio):
    of_case = {"nbytes": "4096", "connections": "64", "front_ends": front_ends}
    figures = {"per_second": rate, "bytes_per_second": "2e9", "p50_ms": "1", "p99_ms": "2", "rate_over_none": ratio}
    return of_case | figures


def test_table_has_medians_over_rounds():
    rows = [row("0", "100", "1"), row("4", "300", "3")] * 2 + [row("0", "500", "1"), row("4", "1000", "2")]
    assert format_table(rows).splitlines()[2:] == [
        "| 4096 | 64 | 0 | 100 | 2.00 | 1.000 | 2.000 | 1.00 |",
        "| 4096 | 64 | 4 | 300 | 2.00 | 1.000 | 2.000 | 3.00 |",
    ]
