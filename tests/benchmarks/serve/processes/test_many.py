"""One server for many processes: the table, what a process that normalises tells, and a short run."""

import itertools
import os
from types import SimpleNamespace

import pytest

from benchmarks.serve.clients import normalising_process
from benchmarks.serve.processes import many
from benchmarks.serve.processes.many import _measure_kill, _NormalisingProcess, _run_turn, format_table

COLUMNS = ("p50_us", "p99_us", "per_second", "first_answer_s", "resident_bytes", "device_bytes", "killed_errors")


def row(clients, caller, value, worst):
    of = dict.fromkeys(COLUMNS, value) | {"resident_bytes": float(value) * 2**20, "device_bytes": 0}
    return {"size": "4 KiB", "clients": clients, "caller": caller, **of, "killed_worst_us": worst}


def test_table_has_medians_over_rounds_and_nothing_where_nobody_was_killed():
    rows = [row(4, "a", value, "7.0") for value in ("1", "9", "2")] + [row(1, "a", "3", "")]
    assert format_table(rows).splitlines()[2:] == [
        "| 4 KiB | 4 | a | 2 | 2 | 2 | 2 | 2 | 0 | 2 | 7 |",
        "| 4 KiB | 1 | a | 3 | 3 | 3 | 3 | 3 | 0 | 3 |  |",
    ]


def test_calls_that_raise_are_counted_and_timed(monkeypatch):
    left, ticks = iter([None, ValueError, None]), itertools.count()
    monkeypatch.setattr(normalising_process, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    def call():
        if (error := next(left)) is not None:
            raise error

    assert normalising_process.call_until(5, call) == {"calls": [(2, 1), (4, 1), (6, 1)], "errors": 1}


def test_memory_that_is_shared_counts_once():
    alone = many.read_resident_bytes([os.getpid()])
    assert 2**20 < alone < 2**40


@pytest.fixture(scope="module")
def processes():
    made = [_NormalisingProcess(os.sched_getaffinity(0), "own cpu", 4096) for _ in range(2)]
    yield made
    for each in made:
        each.end()


@pytest.mark.slow
def test_processes_work_until_they_are_told_and_one_that_is_killed_harms_no_other(processes):
    assert all(each.wait_until_ready() > 0 for each in processes)
    assert all(one["calls"] and not one["errors"] for one in _run_turn(processes, 0.1))
    errors, worst = _measure_kill(processes)
    assert errors == 0
    assert float(worst) > 0
