"""Every scenario that comes with the load test, short and small, over shared memory or HTTP on a Unix socket."""

import itertools
from dataclasses import replace

import pytest
from normload.load import scenarios
from normload.load_run import TargetServer, run_scenario

SCENARIOS = scenarios.load_built_in_scenarios()
MOST_CONNECTIONS = 8


@pytest.fixture(scope="module")
def urls(launched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    launched("--local", str(folder / "local.sock"), "--uds", str(folder / "http.sock"))
    return {"shared memory": f"unix://{folder / 'local.sock'}", "HTTP": f"http+unix://{folder / 'http.sock'}"}


@pytest.fixture(autouse=True)
def without_ceilings(monkeypatch, load_test_forks):
    """Seven runs need not find out what the loopback could do."""
    monkeypatch.setattr("normload.load_run.measure_echo", lambda *amount, is_unix: None)


def shortened(long: scenarios.LoadScenario) -> scenarios.LoadScenario:
    """The same phases, for as short as will do, with a few small requests."""
    phases = [replace(phase, connections=min(phase.connections, MOST_CONNECTIONS)) for phase in long.phases]
    cases = tuple(
        (replace(case, shape=(max(1, case.shape[0] // 512), *case.shape[1:])), share)
        for case, share in long.workload.cases
    )
    return replace(
        long,
        workload=replace(long.workload, cases=cases, max_bytes=2**16, pool=12),
        # An interval of arrivals at random may be longer than a phase.
        phases=tuple(replace(phase, arrivals="constant") if phase.rate else phase for phase in phases[:3]),
        connections=MOST_CONNECTIONS,
        warmup_s=0.02,
        settle_s=0.02,
        cycles=min(long.cycles, 2),
        capacity=replace(long.capacity, duration_s=0.5, connections=2),
    ).with_duration(0.3)


# With phases of each kind of arrivals, over either transport; `make test-slow` runs the others.
QUICK = ("mixed", "overload")


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow)
        for case in zip(SCENARIOS, itertools.cycle(["shared memory", "HTTP"]), strict=False)
    ],
)
def test_it_runs_and_all_answers_are_right(urls, transport, name):
    short = shortened(SCENARIOS[name])
    result = run_scenario(short, TargetServer(urls[transport]), seed=0, processes=1, verify=True)
    assert result.wrong == 0
    assert result.all_phases.total.ok > 0
    # Those while the server's capacity was looked for are checked, too.
    before = sum(count for (status, _), count in result.apart.items() if status == 200)
    assert result.all_phases.total.ok <= result.checked <= result.all_phases.total.ok + before
    assert [each.phase.name for each in result.phases] == [
        phase.name for each in short.list_segments() for phase in each
    ]
