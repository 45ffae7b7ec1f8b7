import re
from math import prod

import pytest
from normload.load.scenarios import LoadPhase, load_built_in_scenarios, load_scenario, parse_scenario
from normload.load.toml_tables import ScenarioError

STEADY = """
[[phases]]
name = "steady"
arrivals = "poisson"
rate = "60%"
duration_s = 30.0
"""


def test_every_kind_of_load_comes_with_the_harness():
    scenarios = load_built_in_scenarios()
    assert scenarios.keys() == {"steady", "burst", "ramp", "overload", "mixed", "large", "soak"}
    assert all(each.description and each.duration_s > 0 for each in scenarios.values())
    assert scenarios["soak"].duration_s >= 3600
    assert len(scenarios["ramp"].list_segments()) >= 10
    for case, _ in scenarios["large"].workload.draw_cases(0):
        assert prod(case.shape) * case.dtype.itemsize >= 2**24


def test_what_is_left_out_has_a_default():
    scenario = parse_scenario("mine", STEADY)
    assert scenario.name == "mine"
    assert scenario.phases == (LoadPhase("steady", "poisson", 30.0, 0.6, of_capacity=True),)
    assert scenario.needs_capacity
    assert scenario.phases[0].resolve_rate(500.0) == LoadPhase("steady", "poisson", 30.0, 300.0)


def test_a_list_of_rates_is_a_phase_for_each():
    scenario = parse_scenario("mine", STEADY.replace('"60%"', '["50%", 200]'))
    assert [(phase.name, phase.rate) for phase in scenario.phases] == [("steady 50%", 0.5), ("steady 200", 200.0)]


def test_phases_run_into_one_another_unless_they_settle_or_are_closed():
    other = STEADY.replace("steady", "after")
    closed = '[[phases]]\nname = "closed"\narrivals = "closed"\nconnections = 2\nduration_s = 1.0\n'
    names = [
        [phase.name for phase in each]
        for each in parse_scenario("mine", STEADY + other + closed + other).list_segments()
    ]
    assert names == [["steady", "after"], ["closed"], ["after"]]
    assert len(parse_scenario("mine", "settle_s = 1.0\n" + STEADY + other).list_segments()) == 2
    assert [len(each) for each in parse_scenario("mine", "cycles = 3\n" + STEADY + other).list_segments()] == [6]


def test_another_duration_is_shared_out():
    scenario = parse_scenario("mine", "cycles = 2\n" + STEADY + STEADY.replace("30.0", "10.0")).with_duration(8.0)
    assert [phase.duration_s for phase in scenario.phases] == [3.0, 1.0]
    assert scenario.duration_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("phases = 3", "phases must be an array of tables"),
        ("", "at least one of"),
        ("x = [", "mine: "),
        (STEADY + "rat = 3", "rat is unknown; did you mean rate?"),
        (
            STEADY.replace('"poisson"', '"random"'),
            "arrivals must be one of poisson, constant, closed, got 'random'",
        ),
        (STEADY.replace('"60%"', '"60"'), "rate must be"),
        (STEADY.replace('"60%"', "-1"), "rate must be"),
        (STEADY.replace('"60%"', '"much%"'), "rate must be"),
        (STEADY.replace("30.0", "0"), "duration_s must be a number above 0, got 0"),
        (STEADY.replace('rate = "60%"', ""), "rate is missing"),
        (STEADY.replace('"poisson"', '"closed"'), "connections is missing"),
        ("connections = 1.5" + STEADY, "connections must be a whole number above 0, got 1.5"),
        ("cycles = true" + STEADY, "cycles must be a whole number"),
        ("cycles = 1000000" + STEADY, "cycles must be at most 10000, got 1000000"),
        ("connections = 100000" + STEADY, "connections must be at most 65536, got 100000"),
        (STEADY.replace("30.0", "1" + "0" * 400), "duration_s must be at most 1e+09"),
        (STEADY.replace("30.0", "inf"), "duration_s must be at most 1e+09, got inf"),
        (STEADY.replace("30.0", "nan"), "duration_s must be a number above 0, got nan"),
        (STEADY.replace('"60%"', "1" + "0" * 400), "rate must be"),
        (STEADY.replace('"60%"', "inf"), "rate must be"),
        ("warmup_s = 1e300" + STEADY, "warmup_s must be at most"),
        ("[workload]\nmax_mib = 1e300" + STEADY, "max_mib must be at most 16384"),
        ("[workload]\nmin_kib = 1e300" + STEADY, "min_kib must be at most"),
        ("[workload]\npool = 1000000000000" + STEADY, "pool must be at most 100000"),
        ("[workload]\nmix = { rms_norm = inf }" + STEADY, "rms_norm must have a finite share above 0"),
        (
            '[[workload.cases]]\noperation = "layer_norm"\nshape = [4294967296, 2]' + STEADY,
            "shape must have at most 4294967296 elements",
        ),
        (f'[[workload.cases]]\noperation = "layer_norm"\nshape = {[1] * 65}' + STEADY, "shape must have at most"),
        ("x = " + "9" * 10_000, "mine: "),
        ("x = " + "[" * 100_000, "mine: "),
        ("settle_s = -1" + STEADY, "settle_s must be a number that is not negative"),
        ("conections = 5" + STEADY, "did you mean connections?"),
        ("[workload]\nmix = { batch_norm = 1 }" + STEADY, "an operation must be one of"),
        ("[workload]\nmix = { rms_norm = 0 }" + STEADY, "rms_norm must have a finite share above 0"),
        ("[workload]\npol = 3" + STEADY, "did you mean pool?"),
        ('[[workload.cases]]\noperation = "layer_norm"\nshape = []' + STEADY, "shape must be a list"),
        ('[[workload.cases]]\noperation = "layer_norm"\nshape = [4]\nnum_groups = 2' + STEADY, "num_groups"),
        ('[[workload.cases]]\noperation = "group_norm"\nshape = [1, 6]\nnum_groups = 4' + STEADY, "must divide"),
        ('[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nadaptive = true' + STEADY, "adaptive needs"),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [2, 4]\nheads = true\nadaptive = true' + STEADY,
            "adaptive does not belong to heads",
        ),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nlayout = "nchw"' + STEADY,
            "layout nchw needs a shape of at least two sizes",
        ),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [2, 4]\nheads = true\nlayout = "nchw"' + STEADY,
            "layout nchw does not belong to heads",
        ),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [2, 4]\nlayout = "nchw"'
            '\nout_dtype = "float8_e4m3fn"' + STEADY,
            "without heads and layout nchw",
        ),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nnegative_slope = 0.5' + STEADY,
            "negative_slope belongs",
        ),
        ('[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nnorms = 2' + STEADY, "norms belongs"),
        ('[[workload.cases]]\noperation = "layer_norm_chain"\nshape = [4]' + STEADY, "norms is missing"),
        ('[[workload.cases]]\noperation = "group_norm"\nshape = [4, 8]' + STEADY, "num_groups is missing"),
        ('[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nfoo = 1' + STEADY, "expected operation, shape"),
        ("[workload]\nmix = {}" + STEADY, "at least one of layer_norm"),
        ("[workload]\nmin_kib = 2\nmax_mib = 0.001" + STEADY, "min_kib must be at most max_mib"),
        (STEADY.replace('"steady"', '"all"'), "name must be a text other than 'all'"),
        (STEADY.replace('"steady"', '""'), "name must be a text other than 'all'"),
        (STEADY.replace('"60%"', "[]"), "rate must be"),
        ('[[workload.cases]]\noperation = "rms_norm"\nshape = [4, 8]\nparts = 5' + STEADY, "parts need a shape"),
        ('[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\nparts = 2' + STEADY, "parts need a shape"),
        (
            '[[workload.cases]]\noperation = "layer_norm_chain"\nshape = [4]\nnorms = 2\nresidual = true' + STEADY,
            "takes shape, dtype, out_dtype, norms and parts alone",
        ),
        (
            '[[workload.cases]]\noperation = "rms_norm"\nshape = [4]\ndtype = "int8"' + STEADY,
            "dtype must be one of",
        ),
    ],
)
def test_what_means_nothing_is_refused_and_said(text, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        parse_scenario("mine", text)


def test_objectives_are_of_the_run_of_a_phase_or_of_an_operation():
    text = """
        [workload]
        mix = { layer_norm = 1, "rms_norm/backward" = 1 }

        [[objectives]]
        bound = "errors<0.1%"

        [[objectives]]
        bound = "p99 < 20ms"
        phase = "steady"
        operation = "rms_norm/backward"
        """
    objectives = parse_scenario("mine", text + STEADY).objectives
    assert [each.label for each in objectives] == ["errors<0.1%", "p99 < 20ms of rms_norm/backward in steady"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('bound = "p99<20"', "[[objectives]] 1: bound: p99 must be a time like 20ms"),
        ('bound = "p99<20ms"\nphase = "later"', "phase must be one of steady"),
        ('bound = "p99<20ms"\noperation = "softmax"', "operation must be one of"),
        ('bound = "p99<20ms"\noperations = "layer_norm"', "did you mean operation?"),
        ("", "bound is missing"),
    ],
)
def test_an_objective_that_means_nothing_is_refused_and_said(line, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        parse_scenario("mine", f"{STEADY}\n[[objectives]]\n{line}\n")


def test_the_smallest_sizes_are_sizes():
    workload = parse_scenario("mine", "[workload]\nmin_kib = 1e-30\nmax_mib = 1e-30\npool = 3" + STEADY).workload
    assert all(case.make_tensors()["x"].nbytes <= 4 * max(case.shape) for case, _ in workload.draw_cases(0))


def test_a_file_is_read(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(STEADY)
    assert load_scenario(str(file)).name == "own"


def test_a_name_that_nobody_knows_is_said_with_those_that_are_known():
    with pytest.raises(ScenarioError, match=r"burst.*steady.*got 'nothing'"):
        load_scenario("nothing")


def test_descriptions_are_true_for_any_duration():
    """A description is shown in the report of a run, whose `--duration` may differ from the scenario's."""
    for scenario in load_built_in_scenarios().values():
        assert not re.search(r"\b(second|minute|hour|half a|\d+ ?(s|min|h))\b", scenario.description)
