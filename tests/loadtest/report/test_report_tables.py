"""Every report has the same numbers: on the page, in Markdown and in CSV."""

import csv
import io
import math
from collections import Counter
from dataclasses import replace

import pytest
from normload.load.objectives import parse_objective
from normload.load.scenarios import LoadPhase
from normload.measurements.objective_outcomes import evaluate_objective
from normload.measurements.results import PhaseResult
from normload.measurements.tallies import PhaseTally, RequestOutcome
from normload.report import csv_report, html_report, report_tables

from tests.loadtest.conftest import made_result


@pytest.fixture
def result():
    made = made_result([0.01] * 400, errors=40)
    made.capacity = 1234.0
    made.apart = Counter({(200, "ok"): 7})
    return made


@pytest.fixture
def outcomes(result):
    objectives = map(parse_objective, ("p99<1ms", "errors<50%"))
    return [evaluate_objective(each, result) for each in objectives]


def test_a_page_and_a_summary_have_all_that_the_terminal_has(result, outcomes):
    wanted = {
        cell
        for rows in (report_tables.make_phase_rows(result), report_tables.make_operation_rows(result))
        for row in rows
        for cell in row
    }
    wanted |= {*report_tables.list_facts(result).values(), "1234/s", "passed", "failed"}
    text, summary = html_report.render_html(result, outcomes), report_tables.render_markdown(result, outcomes)
    for cell in wanted - {result.url}:
        assert cell.replace("<", "&lt;") in text
        assert cell.replace("_", "\\_") in summary
    assert "p99&lt;1ms" in text
    assert report_tables.list_facts(result)["duration"] == "10.0 s"


def test_statuses_hold_the_warm_up_and_errors_do_not(result):
    by_status = result.count_sent_by_status()
    assert report_tables.format_statuses(result) == ", ".join(
        f"{status}: {by_status[status]}" for status in sorted(by_status)
    )
    assert sum(by_status.values()) == 7 + result.all_phases.total.requests
    assert sum(int(each.rsplit(": ")[1]) for each in report_tables.format_errors(result).split(", ")) == 40
    assert report_tables.format_errors(made_result([0.01])) == ""


def test_without_objectives_there_is_no_table_of_them(result):
    assert "objective" not in report_tables.render_markdown(result)
    assert "<th>objective" not in html_report.render_html(result)


def test_what_a_server_says_is_no_markup(result):
    result.server = {"version": "1](http://evil)|x\n# y", "backend": "<b>", "device": {"name": "`z`"}}
    lines = report_tables.render_markdown(result).splitlines()
    (server,) = [line for line in lines if line.startswith("- server")]
    assert not any(line.startswith("#") for line in lines)
    for mark in "]<`|":
        assert server.count(mark) == server.count(f"\\{mark}")


def test_a_line_of_csv_is_of_a_phase_and_an_operation(result):
    lines = list(csv.DictReader(io.StringIO(csv_report.render_csv(result))))
    named = [(line["phase"], line["operation"]) for line in lines]
    assert (
        len(set(named)) == len(named) == (len(result.summarise_phases()) + 1) * (len(result.list_operations()) + 1)
    )
    whole = lines[named.index(("all", "all"))]
    assert float(whole["ok_per_second"]) == pytest.approx(result.all_phases.rate, rel=1e-5)
    assert float(whole["p99_s"]) == pytest.approx(
        result.all_phases.total.latency.compute_percentile_s(99), rel=1e-5
    )
    assert int(whole["errors"]) == 40
    assert all(line["offered_per_second"] == "" for line in lines if line["operation"] != "all")


def test_a_spreadsheet_computes_nothing(result):
    (one,) = result.phases
    result.phases = [replace(one, phase=replace(one.phase, name="=1+1"))]
    lines = list(csv.DictReader(io.StringIO(csv_report.render_csv(result))))
    assert {line["phase"] for line in lines} == {"'=1+1", "all"}


def test_a_run_without_answers_is_written_as_well():
    empty = made_result([])
    assert math.isnan(empty.all_phases.total.latency.compute_percentile_s(99))
    lines = list(csv.DictReader(io.StringIO(csv_report.render_csv(empty))))
    assert {line["p99_s"] for line in lines} == {""}
    assert "| all |" in report_tables.render_markdown(empty)


def test_a_sustained_load_is_that_which_was_sent():
    phases = []
    for rate in (10, 20, 30):
        tally = PhaseTally(1.0)
        tally.add_records(
            RequestOutcome("layer_norm", 0.5, 0.5, 0.5, 0.6, 200, "ok", 100, 100) for _ in range(rate - 1)
        )
        phases.append(PhaseResult(LoadPhase(f"load {rate}", "poisson", 1.0, rate=rate), 0.0, 1.0, tally))
    *_, sentence = report_tables.list_sentences(made_result([], phases=phases))
    assert sentence == "Sustained: 29/s; highest rate of successful requests: 29/s."
