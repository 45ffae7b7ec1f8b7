"""A comparison on the terminal, as Markdown and as CSV."""

import csv
import io
from dataclasses import replace

import pytest
from normload.report import comparison_report
from normload.report.comparison import compare_runs
from normload.report.terminal_report import make_console

from tests.loadtest.conftest import made_result


def run(slower=1.0, count=4000, **changed):
    return made_result([slower * 0.01 * (1 + number % 7 / 100) for number in range(count)], **changed)


@pytest.fixture(scope="module")
def same():
    return compare_runs([run()], [run()])


@pytest.fixture(scope="module")
def worse():
    return compare_runs([run()], [run(2.0)])


@pytest.fixture(scope="module")
def of_several():
    return compare_runs(
        [run(1 + number / 1000) for number in range(3)], [run(2 + number / 1000) for number in range(3)]
    )


def test_only_changes_are_shown(same, worse, capsys):
    comparison_report.print_significant_changes(make_console(), same)
    assert capsys.readouterr().out == "No change beyond noise: 8 values compared.\n"
    comparison_report.print_significant_changes(make_console(), worse, ["Another load."])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert [row[1] for row in rows if row[:1] == ["steady"]] == ["p50", "p90", "p99", "p99.9"]
    assert all(row[6].startswith("+") for row in rows if row[:1] == ["steady"])
    assert last == "Another load."


def test_a_summary_has_the_changes_as_a_table(same, worse):
    lines = comparison_report.render_markdown("steady, 1 run", worse, ["Another_load."]).splitlines()
    assert lines[0] == "**normload compare: steady, 1 run**"
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| steady")]
    assert [(row[1], row[-1]) for row in rows] == [
        (f"p{percent}", "worse") for percent in ("50", "90", "99", "99.9")
    ]
    assert lines[-1] == "- Another\\_load."
    assert "No change beyond noise: 8 values compared." in comparison_report.render_markdown("steady", same)


@pytest.mark.parametrize(("found", "has"), [("worse", False), ("of_several", True)])
def test_the_spread_is_shown_of_several_runs(found, has, capsys, request):
    found = request.getfixturevalue(found)
    comparison_report.print_significant_changes(make_console(), found)
    assert ("spread before" in capsys.readouterr().out) == has
    header, _, *rows = comparison_report.render_markdown("steady", found).splitlines()[2:]
    assert ("spread after" in header) == has
    assert all(row.count("|") == header.count("|") for row in rows if row)


def test_a_line_of_csv_is_a_metric_of_a_phase(worse, of_several):
    lines = list(csv.DictReader(io.StringIO(comparison_report.render_csv(of_several))))
    assert len(lines) == len(of_several)
    median = next(line for line in lines if line["metric"] == "p50")
    assert float(median["before"]) == pytest.approx(0.0103, rel=0.02)
    assert float(median["interval_low"]) <= 2 <= float(median["interval_high"])
    assert 0 <= float(median["spread_before"]) < 0.02
    assert (median["phase"], median["result"]) == ("steady", "worse")
    assert next(line for line in lines if line["metric"] == "rate")["result"] == "same"
    alone = list(csv.DictReader(io.StringIO(comparison_report.render_csv(worse))))
    assert {line["spread_before"] for line in alone} == {""}


def test_a_spreadsheet_computes_nothing():
    found = compare_runs([run(scenario="x")], [run(scenario="x")])
    hostile = [replace(each, phase="=1+1") for each in found]
    lines = list(csv.DictReader(io.StringIO(comparison_report.render_csv(hostile))))
    assert {line["phase"] for line in lines} == {"'=1+1"}
