"""What traces cost: the collector that takes everything, and the table."""

import urllib.request

from benchmarks.serve.tracing import TRACED, _run_collector, format_table


def test_table_has_medians_over_rounds():
    rows = [
        {"connections": 64, "traced": traced, "per_second": rate, "p50_ms": "0.5", "rate_over_untraced": ratio}
        for traced in TRACED
        for rate, ratio in (("100", "1.0"), ("90", "0.9"), ("110", "1.1"))
    ]
    assert format_table(rows).splitlines()[2:] == [
        f"| 64 | {traced} | 100 | 0.500 | 1.000 (0.900 to 1.100) |" for traced in TRACED
    ]


def test_the_collector_takes_what_it_is_sent():
    with _run_collector() as url:
        for _ in range(2):
            with urllib.request.urlopen(f"{url}/v1/traces", data=bytes(100_000)) as answer:
                assert (answer.status, answer.read()) == (200, b"")
