from benchmarks.serve.behaviour.scenarios import _open_loop, _quantile
from benchmarks.serve.clients.posts import Post
from tests.benchmarks.serve.fake_server import PARAMETERS, Server, against, normalised


def test_open_loop_tells_what_was_served_from_what_was_refused():
    async def play(port: int) -> None:
        tally = await _open_loop(port, Post("/v1/layer_norm", 2**12, PARAMETERS), 200, 0.1)
        assert (len(tally.served), len(tally.refused), tally.other, tally.broken) == (5, 15, 0, 0)

    against(Server(normalised, admits=5), play)


def test_quantiles():
    assert _quantile([3, 1, 2], 0.5) == 2
    assert _quantile(range(100), 0.99) == 99
    assert _quantile([], 0.99) == 0
