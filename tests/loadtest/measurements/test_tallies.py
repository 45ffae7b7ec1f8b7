import json

import pytest
from normload.measurements.tallies import INTERVALS, PhaseTally, RequestOutcome, format_error


def record(due_s=0.0, took_s=0.1, *, code="ok", status=200, operation="rms_norm", **others):
    return RequestOutcome(operation, due_s, due_s, due_s, due_s + took_s, status, code, **others)


def tally(*records, duration_s=6.0):
    made = PhaseTally(duration_s)
    made.add_records(records)
    return made


def test_an_error_without_a_code_is_its_status_and_without_a_status_its_code():
    assert format_error(429, "overloaded") == "429 overloaded"
    assert format_error(404, "404") == "404"
    assert format_error(0, "timeout") == "timeout"


def test_sums_are_of_successes_and_counts_of_all():
    ok = [
        record(took_s=took_s, sent_bytes=10, received_bytes=5, kernel_bytes=7, kernel_s=0.1)
        for took_s in (0.1, 0.3)
    ]
    bad = [record(code="overloaded", status=429, sent_bytes=99), record(code="timeout", status=0)]
    total = tally(*ok, *bad).sum_all()
    assert (total.requests, total.ok, total.errors) == (4, 2, 2)
    assert (total.moved_bytes, total.kernel_bytes, total.kernel_s) == (30, 14, 0.2)
    assert total.latency.count == 2
    assert total.latency.max_s == pytest.approx(0.3)
    assert total.outcomes == {(200, "ok"): 2, (429, "overloaded"): 1, (0, "timeout"): 1}


def test_answers_count_where_they_ended():
    made = tally(record(0.05), record(5.05), record(5.95), record(5.05, took_s=3.0))
    assert made.sum_all().ok == 4
    assert made.sum_in_time().ok == 2
    assert made.sum_in_time(within_s=7.0).ok == 3
    assert sorted(made.sum_by_interval()) == [1, 51, INTERVALS, 80]


def test_operations_are_kept_apart():
    made = tally(record(), record(operation="layer_norm"), record(operation="layer_norm"))
    assert made.list_operations() == ["layer_norm", "rms_norm"]
    assert made.sum_all("layer_norm").ok == made.sum_in_time("layer_norm").ok == 2


def test_latency_counts_from_when_it_was_due_and_lag_from_when_it_could_be_sent():
    late = RequestOutcome("rms_norm", 1.0, 1.5, 1.6, 2.0, 200, "ok")
    made = tally(late)
    assert made.sum_all().latency.max_s == pytest.approx(1.0)
    assert made.service.max_s == pytest.approx(0.4)
    assert made.lag.max_s == pytest.approx(0.1)
    # A connection that was free for long waited for the schedule, which is no delay.
    early = tally(RequestOutcome("rms_norm", 1.0, 0.2, 1.05, 2.0, 200, "ok"))
    assert early.lag.max_s == pytest.approx(0.05)


def test_what_was_never_sent_is_an_error_without_a_latency():
    made = tally(record(code="not_sent", status=0))
    assert (made.sum_all().errors, made.sum_all().latency.count, made.lag.count) == (1, 0, 0)


def test_faults_are_counted_and_the_first_ones_kept():
    made = tally(*(record(checked=True, fault=f"fault {number}") for number in range(8)), record(checked=True))
    assert (made.checked, made.wrong) == (9, 8)
    assert made.faults == [f"rms_norm: fault {number}" for number in range(5)]


def test_shares_of_processes_add_up():
    records = [
        record(number / 10, 0.01 * number, operation=("a", "b")[number % 2], sent_bytes=number, kernel_s=0.5)
        for number in range(50)
    ]
    records += [record(code="timeout", status=0, checked=True, fault="x") for _ in range(9)]
    # Late by themselves by different times.
    records += [RequestOutcome("a", 1.0, 1.0, 1.0 + late_s, 3.0, 200, "ok") for late_s in (0.01, 0.02, 0.4, 0.8)]
    whole, parts = tally(*records), tally(*records[::2])
    parts.merge(tally(*records[1::2]))
    again = PhaseTally.from_json(json.loads(json.dumps(parts.to_json())))
    for made in (parts, again):
        assert made.cells.keys() == whole.cells.keys()
        assert made.sum_all().outcomes == whole.sum_all().outcomes
        assert made.sum_all().latency.compute_percentile_s(90) == whole.sum_all().latency.compute_percentile_s(90)
        assert (made.checked, made.wrong, made.faults) == (whole.checked, whole.wrong, whole.faults)
        assert made.sum_all().to_json() == whole.sum_all().to_json()
        assert (made.checked, made.wrong, len(made.faults)) == (9, 9, 5)
        for name in ("service", "lag"):
            mine, all_of_it = getattr(made, name), getattr(whole, name)
            assert (mine.count, mine.max_s) == (all_of_it.count, all_of_it.max_s)
