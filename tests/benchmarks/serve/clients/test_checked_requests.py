import pytest

from benchmarks.serve.clients.checked_requests import CheckedRequest
from benchmarks.serve.clients.raw_client import RawConnection
from tests.benchmarks.serve.fake_server import PARAMETERS, Server, against, normalised


@pytest.mark.parametrize("waits", [False, True])
def test_right_answers_are_believed(waits):
    async def play(port: int) -> None:
        wire = await RawConnection.open(port)
        post = CheckedRequest("/v1/layer_norm", 2**14, PARAMETERS)
        for _ in range(3):
            assert (await post.send(wire, waits_for_leave=waits)).status == 200
        wire.close()

    against(Server(normalised), play)


def test_wrong_answers_are_not():
    async def play(port: int) -> None:
        wire = await RawConnection.open(port)
        with pytest.raises(AssertionError):
            await CheckedRequest("/v1/layer_norm", 2**14, PARAMETERS).send(wire)
        wire.close()

    against(Server(lambda body: body), play)


def test_answer_that_differs_from_the_first_is_not_believed():
    post = CheckedRequest("/v1/layer_norm", 2**14, PARAMETERS)
    right = bytearray(normalised(post.body))
    post.check_body(right)
    wrong = bytearray(right)
    wrong[-1] ^= 1
    with pytest.raises(AssertionError, match="differs"):
        post.check_body(wrong)


def test_every_window_of_a_long_answer_has_its_turn():
    post = CheckedRequest("/v1/layer_norm", 2**23, PARAMETERS)
    right = bytearray(normalised(post.body))
    post.check_body(right)
    wrong = bytearray(right)
    wrong[-1] ^= 1

    def check_often() -> None:
        for _ in range(10):
            post.check_body(wrong)

    with pytest.raises(AssertionError, match="differs"):
        check_often()
    with pytest.raises(AssertionError, match="length"):
        post.check_body(right[:-1])
