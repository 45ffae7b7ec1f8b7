import json
import math
from collections import Counter

import pytest
from normload.load.scenarios import LoadPhase
from normload.measurements.loopback_echo import LoopbackEcho
from normload.measurements.machine_use import PeakMachineUse
from normload.measurements.results import FORMAT, PhaseResult, RunResult, read_result
from normload.measurements.tallies import PhaseTally, RequestOutcome

from tests.loadtest.conftest import made_result


def phase(name, start_s, ended_s, *, rate=10.0, segment_s=2.0):
    tally = PhaseTally(1.0)
    tally.add_records([RequestOutcome("layer_norm", 0.5, 0.5, 0.5, at, 200, "ok", 100, 100) for at in ended_s])
    return PhaseResult(LoadPhase(name, "poisson", 1.0, rate=rate), start_s, segment_s, tally)


def test_a_file_holds_all_of_it(tmp_path):
    result = made_result([0.01] * 100, errors=3, echo=LoopbackEcho(1000, 2, 5000.0, 1e-4), faults=["x"], wrong=1)
    result.machine = PeakMachineUse(4, 0.75, 0.5)
    result.write_json(tmp_path / "a.json")
    again = read_result(tmp_path / "a.json")
    assert again.to_json() == result.to_json()
    assert again.machine == result.machine
    assert again.echo.bytes_per_second == 10_000_000
    assert again.all_phases.total.outcomes == {(200, "ok"): 100, (429, "overloaded"): 3}


def test_its_summary_is_for_other_programs():
    document = json.loads(json.dumps(made_result([0.01] * 100, errors=25).to_json(), allow_nan=False))
    steady, whole = document["summary"]["phases"]
    assert (steady["name"], whole["name"]) == ("steady", "all")
    assert steady["ok_per_second"] == 10
    assert steady["latency_s"]["p99.9"] == pytest.approx(0.01, rel=0.01)
    assert steady["errors"] == {"429 overloaded": 25}
    assert document["summary"]["sent_by_status"] == {"200": 103, "429": 25}
    assert document["summary"]["kernel_bytes_per_second"] == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be the JSON that `normload run --json` writes"),
        ("phase,metric", "must be the JSON that `normload run --json` writes"),
        ("[]", "its format must be normload/1"),
        ("{}", "its format must be normload/1"),
        ('{"format": "normload/0"}', "its format must be normload/1"),
        (json.dumps({"format": FORMAT}), "this is not a complete result"),
        (json.dumps(made_result([0.01]).to_json() | {"apart": ["x"]}), "this is not a complete result"),
    ],
)
def test_another_file_is_refused(tmp_path, text, said):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json: .*{said}"):
        read_result(file)


def test_a_file_that_lies_is_refused(tmp_path):
    made = made_result([0.01] * 10, echo=LoopbackEcho(1000, 2, 5000.0, 1e-4)).to_json()
    lies = [
        made | {name: lie}
        for name in ("phases", "echo", "machine", "apart")
        for lie in (7, [7], {"a": 1}, [[1, 2]], "x")
    ]
    lies += [json.loads(json.dumps(made).replace('"duration_s": 10.0', '"duration_s": "x", "more": 1'))]
    file = tmp_path / "a.json"
    for text in [*map(json.dumps, lies), "[" * 100_000, '{"format": "' + "\\ud800" + '"}']:
        file.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json: "):
            read_result(file)


def test_a_file_from_before_the_machine_was_measured_is_read():
    document = made_result([0.01] * 10).to_json()
    del document["machine"]
    assert RunResult.from_json(document).machine is None


@pytest.mark.parametrize("said", [None, "fast", [1], True, -1.0, 0, float("nan"), float("inf"), 10**400])
def test_a_bandwidth_that_cannot_be_one_is_none(said):
    result = made_result([], server={"copy_bandwidth_bytes_per_second": said})
    assert result.copy_bandwidth is None


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ({}, ""),
        ({"version": "1", "backend": "cpu", "device": {"name": "x"}}, "normserve 1, cpu on x"),
        ({"version": 1, "device": "x"}, "normserve ?, ? on ?"),
        ({"version": "1\x1b", "backend": "b" * 100, "device": {}}, f"normserve 1\ufffd, {'b' * 63}… on ?"),
    ],
)
def test_a_server_is_named_by_what_can_be_printed(server, name):
    assert made_result([], server=server).server_name == name


def test_late_answers_are_the_run_s_and_not_their_phase_s():
    burst, after = phase("burst", 0.0, [0.9, 1.5, 2.5]), phase("after", 1.0, [0.9], segment_s=1.0)
    result = made_result([], phases=[burst, after])
    assert [part.in_time.ok for part in result.summarise_phases()] == [1, 1]
    assert result.all_phases.in_time.ok == 3
    assert result.all_phases.total.ok == 4


def test_phases_of_one_name_are_counted_together():
    result = made_result([], phases=[phase("a", 0.0, [0.5]), phase("b", 1.0, []), phase("a", 2.0, [0.5], rate=30)])
    first, second = result.summarise_phases()
    assert (first.name, first.offered, first.total.ok, first.rate) == ("a", 20, 2, 1)
    assert (second.name, second.total.requests) == ("b", 0)
    assert math.isnan(second.errors)


def test_what_was_never_sent_was_not_sent():
    tally = PhaseTally(1.0)
    tally.add_records(
        [
            RequestOutcome("a", 0, 0, 0, 1, status, code)
            for status, code in ((0, "not_sent"), (0, "timeout"), (200, "ok"))
        ]
    )
    result = made_result([], phases=[PhaseResult(LoadPhase("a", "constant", 1.0, rate=3), 0.0, 1.0, tally)])
    assert result.count_sent_by_status() == Counter({200: 4, 0: 1})


def test_a_closed_loop_offers_nothing_and_is_no_sweep():
    closed = PhaseResult(LoadPhase("a", "closed", 1.0, connections=1), 0.0, 1.0, PhaseTally(1.0))
    result = made_result([], phases=[closed])
    assert math.isnan(result.all_phases.offered)
    assert result.find_sweep() is None
    assert isinstance(RunResult.from_json(json.loads(json.dumps(result.to_json()))), RunResult)
