from benchmarks.serve.clients.checked_requests import CheckedRequest
from benchmarks.serve.clients.raw_client import RawConnection
from tests.benchmarks.serve.fake_server import PARAMETERS, Server, against, normalised


def test_memory_of_an_answer_outlives_the_leave_to_send_the_next_request():
    async def play(port: int) -> None:
        wire = await RawConnection.open(port)
        post = CheckedRequest("/v1/layer_norm", 2**14, PARAMETERS)
        bodies = [(await post.send(wire, waits_for_leave=True)).body for _ in range(2)]
        assert bodies[0] is bodies[1]
        wire.close()

    against(Server(normalised), play)


def test_refused_body_is_not_sent():
    server = Server(normalised, admits=0)

    async def play(port: int) -> None:
        wire = await RawConnection.open(port)
        answered = await CheckedRequest("/v1/layer_norm", 2**20, PARAMETERS).send(wire, waits_for_leave=True)
        assert (answered.status, answered.is_reusable) == (429, False)
        wire.close()

    against(server, play)
    assert server.bodies == 0
