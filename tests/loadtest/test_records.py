import math

import pytest
from normload.records import Record, percentile, summarise


def test_percentiles_are_values_that_occurred():
    hundred = list(range(1, 101))
    assert [percentile(hundred, percent) for percent in (0, 50, 99, 99.5, 100)] == [1, 50, 99, 100, 100]
    assert percentile([7], 99) == 7
    assert math.isnan(percentile([], 50))


def test_a_summary_counts_rates_of_successes_and_errors_by_code():
    ok = [Record("rms_norm", 0, latency_s, "ok", 100, 50, checked=True) for latency_s in (0.1, 0.2, 0.3)]
    wrong = Record("rms_norm", 0, 0.4, "ok", 100, 50, checked=True, fault="y is off")
    errors = [Record("rms_norm", 0, 9, code, 100) for code in ("overloaded", "overloaded", "timeout")]
    summary = summarise([*ok, wrong, *errors], elapsed_s=2)
    assert summary.requests == 7
    assert summary.rate == 2
    assert summary.bytes_per_second == pytest.approx(300)
    assert (summary.p50_s, summary.p99_s) == (0.2, 0.4)
    assert summary.errors == {"overloaded": 2, "timeout": 1}
    assert (summary.checked, summary.wrong) == (4, 1)


def test_a_run_without_an_answer_has_no_latency():
    summary = summarise([Record("rms_norm", 0, 1, "timeout", 100)], elapsed_s=0)
    assert (summary.rate, summary.bytes_per_second) == (0, 0)
    assert math.isnan(summary.p50_s)
