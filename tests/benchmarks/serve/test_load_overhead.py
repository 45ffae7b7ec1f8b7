from benchmarks.serve.load_overhead import format_table


def row(client, per_second, **ratios):
    return {
        "transport": "tcp",
        "case": "1 row",
        "client": client,
        "per_second": per_second,
        "rate_over_c": "1",
        "p50_over_c": "1",
        "client_cores": "0.2",
    } | ratios


def test_the_table_sets_both_clients_side_by_side():
    rows = [row("c", "1000"), row("normload", "900", rate_over_c="0.9", p50_over_c="1.05")]
    assert format_table(rows).splitlines()[-1] == "| tcp, 1 row | 1000 | 900 | 0.90 | 1.05 | 0.20 |"
