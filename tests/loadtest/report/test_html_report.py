import io
import json
import re
from dataclasses import replace

import pytest
from normload.load.scenarios import load_built_in_scenarios
from normload.measurements.loopback_echo import LoopbackEcho
from normload.measurements.results import PhaseResult
from normload.measurements.tallies import PhaseTally
from normload.report import html_report, report_tables, terminal_report
from rich.console import Console

from tests.loadtest.conftest import made_result

HOSTILE = "</script><img src=http://evil/x onerror=alert(1)>&amp;"


def embedded(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def sweep(latencies_s=(0.01, 0.011, 0.5)):
    phases = []
    for number, (rate, latency_s) in enumerate(zip((50, 100, 200), latencies_s, strict=True)):
        (one,) = made_result([latency_s] * 10 * rate).phases
        phase = replace(one.phase, name=f"load {rate}", rate=float(rate))
        phases.append(PhaseResult(phase, 12.0 * number, 10.0, one.tally))
    return made_result([], phases=phases)


def test_it_loads_nothing_from_anywhere():
    text = html_report.render_html(made_result([0.01] * 100, errors=5))
    assert not re.search(r"""<(?:script|img|link|iframe|object|embed|base)[^>]*\s(?:src|href|data)\s*=""", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|importScripts|\bimport\s*\(", text)
    assert "default-src 'none'" in text
    # The one address beside the server's is that of the plotting library, in a comment.
    assert set(re.findall(r"https?://[^\s<\"')]+", text)) == {
        "https://github.com/leeoniya/uPlot",
        "http://127.0.0.1:8000",
    }


def test_what_comes_from_outside_is_escaped():
    result = made_result([0.01] * 100, scenario=HOSTILE, description=HOSTILE, url=HOSTILE, faults=[HOSTILE])
    result.server = {"version": HOSTILE, "backend": HOSTILE, "device": {"name": HOSTILE}}
    (one,) = result.phases
    result.phases = [PhaseResult(replace(one.phase, name=HOSTILE), 0.0, 10.0, one.tally)]
    cell = next(iter(one.tally.cells.values()))
    cell.outcomes[500, HOSTILE] += 1
    text = html_report.render_html(result)
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert f"500 {HOSTILE}" in embedded(text)["time"]["errors"]
    assert embedded(text)["time"]["phases"][0]["name"] == HOSTILE


def test_plots_over_time_add_up_to_what_happened():
    time = html_report.make_plot_data(made_result([0.01] * 400, errors=40))["time"]
    width = time["s"][1] - time["s"][0]
    assert sum(time["rate"]) * width == pytest.approx(400, rel=0.02)
    assert sum(time["errors"]["429 overloaded"]) * width == pytest.approx(40, rel=0.02)
    assert sum(time["bandwidth"]) * width == pytest.approx(400 * 2000 / 1e9, rel=0.02)
    assert {round(value, 3) for value in time["kernels"]} == {2.0}
    assert time["percentiles"].keys() == {"p50", "p90", "p99", "p99.9"}
    assert all(len(column) == len(time["s"]) for column in time["percentiles"].values())


def test_between_phases_there_is_a_gap_and_in_a_stalled_one_a_zero():
    first, second = sweep().phases[:2]
    stalled = PhaseResult(second.phase, second.start_s, 10.0, PhaseTally(10.0))
    time = html_report.make_plot_data(made_result([], phases=[first, stalled, sweep().phases[2]]))["time"]
    at = {kind: [s for s, rate in zip(time["s"], time["rate"], strict=True) if rate == kind] for kind in (None, 0)}
    assert at[None]
    assert all(s % 12 >= 10 for s in at[None])
    assert {s for s in time["s"] if 12.2 < s < 21.8} <= set(at[0])
    assert not {s for s in time["s"] if 25 < s < 33} & set(at[0])
    assert time["s"] == sorted(time["s"])


def test_a_sweep_has_its_knee_marked():
    load = html_report.make_plot_data(sweep())["load"]
    assert load["offered"] == [50, 100, 200]
    assert load["knee"] == 100
    assert load["percentiles"]["p50"][2] > load["percentiles"]["p50"][0]
    assert html_report.make_plot_data(made_result([0.01]))["load"] is None


def test_without_a_knee_no_report_has_the_word():
    with_one, without = sweep(), sweep((0.01, 0.01, 0.01))
    assert html_report.make_plot_data(without)["load"]["knee"] is None
    for render in (
        lambda result: " ".join(report_tables.list_sentences(result)),
        report_tables.render_markdown,
        shown,
    ):
        assert "knee" in render(with_one).lower()
        assert "knee" not in render(without).lower()
    assert not any("knee" in each.description for each in load_built_in_scenarios().values())


def shown(result):
    console = Console(file=io.StringIO(), width=200)
    terminal_report.print_result(console, result)
    return console.file.getvalue()


def test_the_partial_bin_at_the_end_of_a_run_is_left_out():
    (one,) = made_result([0.01] * 1000).phases
    # Two phases of 10 s, the second of which begins within a bin: the last bin is covered by a part of its width.
    phases = [one, PhaseResult(one.phase, 10.1, 10.0, one.tally)]
    time = html_report.make_plot_data(made_result([], phases=phases))["time"]
    width = time["s"][1] - time["s"][0]
    assert time["s"][-1] + width / 2 <= 20.1
    assert time["s"][-1] + width * 3 / 2 > 20.1
    assert time["rate"][-1] == pytest.approx(100, rel=0.1)


def test_the_partial_bin_before_a_pause_is_a_gap():
    (one,) = made_result([0.01] * 1000).phases
    phases = [PhaseResult(one.phase, start_s, 10.0, one.tally) for start_s in (0.1, 12.0)]
    time = html_report.make_plot_data(made_result([], phases=phases))["time"]
    rates = {round(s, 2): rate for s, rate in zip(time["s"], time["rate"], strict=True)}
    assert rates[9.83] == pytest.approx(100, rel=0.1)
    assert rates[10.17] is None


def test_a_run_shorter_than_a_bin_has_one():
    (one,) = made_result([0.01] * 10).phases
    short = PhaseResult(replace(one.phase, duration_s=0.1), 0.0, 0.1, PhaseTally(0.1))
    assert len(html_report.make_plot_data(made_result([], phases=[short]))["time"]["s"]) == 1


def test_percentiles_reach_three_nines():
    latency = html_report.make_plot_data(made_result([0.001] * 999 + [1.0]))["latency"]
    assert latency["percents"][-1] == 99.9
    assert latency["nines"] == pytest.approx([0, 0.125, 0.301, 0.602, 1, 1.301, 2, 2.301, 3], abs=1e-3)
    (column,) = latency["parts"].values()
    assert column == sorted(column)


def test_ceilings_are_plotted_where_they_are_known():
    result = made_result([0.01] * 10, echo=LoopbackEcho(1000, 1, 1e6, 1e-5))
    assert html_report.make_plot_data(result)["time"]["ceilings"] == {"echo": 2.0, "copy": 5.0}
    result.server, result.echo = {}, None
    assert html_report.make_plot_data(result)["time"]["ceilings"] == {"echo": None, "copy": None}


def test_a_run_without_answers_is_a_page_as_well():
    assert "<table>" in html_report.render_html(made_result([], errors=3))
    assert "<table>" in html_report.render_html(made_result([], phases=[]))


def test_a_server_that_lies_about_itself_spoils_neither_page_nor_report():
    told = {"version": "\x1b[2J", "backend": ["x"], "device": "none", "copy_bandwidth_bytes_per_second": "fast"}
    result = made_result([0.01] * 100, server=told)
    assert "normserve \ufffd[2J, ? on ?" in html_report.render_html(result)
    assert embedded(html_report.render_html(result))["time"]["ceilings"]["copy"] is None
    assert "normserve \ufffd[2J, ? on ?" in shown(result)
    assert "\x1b" not in shown(result)
