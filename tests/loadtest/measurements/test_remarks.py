from normload.load.scenarios import LoadPhase
from normload.measurements.machine_use import PeakMachineUse
from normload.measurements.remarks import list_remarks
from normload.measurements.results import PhaseResult
from normload.measurements.tallies import PhaseTally, RequestOutcome

from tests.loadtest.conftest import made_result


def said(result, *, stopped=False):
    return " ".join(list_remarks(result, stopped=stopped))


def lagging(lag_s, took_s):
    tally = PhaseTally(1.0)
    tally.add_records(
        [RequestOutcome("a", 0.1, 0.0, 0.1 + lag_s, 0.1 + lag_s + took_s, 200, "ok") for _ in range(2000)]
    )
    return made_result([], phases=[PhaseResult(LoadPhase("a", "constant", 1.0, rate=2000), 0.0, 1.0, tally)])


def test_a_good_run_needs_no_words():
    assert said(made_result([0.01] * 1000)) == ""


def test_a_busy_client_was_the_limit():
    assert "The client was the limit" in said(made_result([0.01] * 1000, cpu=[0.2, 0.95]))


def test_a_machine_without_idle_cores_was_the_limit():
    busy = made_result([0.01] * 1000, machine=PeakMachineUse(cores=2, busy=0.97, client=0.35))
    assert "The client's machine was the limit: its 2 cores were busy 97% of the time in the busiest phase" in said(
        busy
    )
    assert "35% with the client" in said(busy)
    assert said(made_result([0.01] * 1000, machine=PeakMachineUse(2, 0.85, 0.8))) == ""


def test_a_closed_loop_s_client_has_its_share_said():
    phase = PhaseResult(
        LoadPhase("a", "closed", 10.0, connections=4), 0.0, 10.0, made_result([0.01] * 2000).phases[0].tally
    )
    busy = made_result([], phases=[phase], cpu=[0.2, 0.45])
    assert "A client process used 45% of a core" in said(busy)
    assert said(made_result([], phases=[phase], cpu=[0.1])) == ""
    assert said(made_result([0.01] * 1000, cpu=[0.45])) == ""


def test_a_late_client_is_said_to_be():
    assert "The client sent late" in said(lagging(0.010, took_s=0.010))
    # Of latencies of a second, ten milliseconds are nothing.
    assert said(lagging(0.010, took_s=0.5)) == ""
    assert said(lagging(0.0001, took_s=0.0001)) == ""


def test_what_was_left_out_is_said():
    tally = PhaseTally(1.0)
    tally.add_records([RequestOutcome("a", 0, 0, 0, 1, 0, "not_sent")] * 7)
    result = made_result([], phases=[PhaseResult(LoadPhase("a", "constant", 1.0, rate=7), 0.0, 1.0, tally)])
    assert "7 requests were never sent: all 4 connections were busy" in said(result)


def test_few_answers_an_early_end_and_no_capacity_are_said():
    assert "only 999 successful requests" in said(made_result([0.01] * 999))
    assert "ended early" in said(made_result([0.01] * 1000), stopped=True)
    assert "the phases were not run" in said(made_result([], capacity=0.0))
