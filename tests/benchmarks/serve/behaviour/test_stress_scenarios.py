from benchmarks.serve.behaviour.stress_scenarios import _compute_quantile, _run_open_loop
from benchmarks.serve.clients.checked_requests import CheckedRequest
from tests.benchmarks.serve.fake_server import PARAMETERS, Server, against, normalised


def test_open_loop_tells_what_was_served_from_what_was_refused():
    async def play(port: int) -> None:
        tally = await _run_open_loop(port, CheckedRequest("/v1/layer_norm", 2**12, PARAMETERS), 200, 0.1)
        assert (len(tally.served_s), len(tally.refused_s), tally.other, tally.broken) == (5, 15, 0, 0)

    against(Server(normalised, admits=5), play)


def test_quantiles():
    assert _compute_quantile([3, 1, 2], 0.5) == 2
    assert _compute_quantile(range(100), 0.99) == 99
    assert _compute_quantile([], 0.99) == 0
