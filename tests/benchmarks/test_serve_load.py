"""The client of the serving benchmarks: what it sends, what it counts, and what it refuses to believe."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from benchmarks.serve.load import Wire
from benchmarks.serve.posts import COLS, Post, make_parameters, npy
from benchmarks.serve.scenarios import _open_loop, _quantile

PARAMETERS = make_parameters()


def normalised(body: bytes) -> bytes:
    x = torch.from_numpy(np.frombuffer(body[128:], np.float32).reshape(-1, COLS).copy())
    weight, bias = (torch.from_numpy(PARAMETERS[name]) for name in ("weight", "bias"))
    return npy(torch.nn.functional.layer_norm(x, (COLS,), weight, bias).numpy())


def answer(status: int, body: bytes, *lines: str) -> bytes:
    head = "\r\n".join((f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines, "", ""))
    return head.encode() + body


class Server:
    """Reads requests and answers as it is told: 200 with `reply`, or 429 beyond so many."""

    def __init__(self, reply: Callable[[bytes], bytes], admits: int = 10**9) -> None:
        self._reply, self._admits = reply, admits
        self.bodies = 0
        self.connections: list[asyncio.Task[None] | None] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not self._admits:
                    writer.write(answer(429, b"no", "Connection: close"))
                    break
                self._admits -= 1
                if b"expect: 100-continue" in head:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.bodies += 1
                writer.write(answer(200, self._reply(body)))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def against(server: Server, play: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        try:
            await play(listening.sockets[0].getsockname()[1])
        finally:
            listening.close()
            await listening.wait_closed()
        await asyncio.gather(*filter(None, server.connections))

    asyncio.run(run())


@pytest.mark.parametrize("waits", [False, True])
def test_right_answers_are_believed(waits):
    async def play(port: int) -> None:
        wire = await Wire.open(port)
        post = Post("/v1/layer_norm", 2**14, PARAMETERS)
        for _ in range(3):
            assert (await post.by(wire, waits_for_leave=waits)).status == 200
        wire.leave()

    against(Server(normalised), play)


def test_wrong_answers_are_not():
    async def play(port: int) -> None:
        wire = await Wire.open(port)
        with pytest.raises(AssertionError):
            await Post("/v1/layer_norm", 2**14, PARAMETERS).by(wire)
        wire.leave()

    against(Server(lambda body: body), play)


def test_answer_that_differs_from_the_first_is_not_believed():
    post = Post("/v1/layer_norm", 2**14, PARAMETERS)
    right = bytearray(normalised(post.body))
    post.check(right)
    wrong = bytearray(right)
    wrong[-1] ^= 1
    with pytest.raises(AssertionError, match="differs"):
        post.check(wrong)


def test_every_window_of_a_long_answer_has_its_turn():
    post = Post("/v1/layer_norm", 2**23, PARAMETERS)
    right = bytearray(normalised(post.body))
    post.check(right)
    wrong = bytearray(right)
    wrong[-1] ^= 1

    def check_often() -> None:
        for _ in range(10):
            post.check(wrong)

    with pytest.raises(AssertionError, match="differs"):
        check_often()
    with pytest.raises(AssertionError, match="length"):
        post.check(right[:-1])


def test_memory_of_an_answer_outlives_the_leave_to_send_the_next_request():
    async def play(port: int) -> None:
        wire = await Wire.open(port)
        post = Post("/v1/layer_norm", 2**14, PARAMETERS)
        bodies = [(await post.by(wire, waits_for_leave=True)).body for _ in range(2)]
        assert bodies[0] is bodies[1]
        wire.leave()

    against(Server(normalised), play)


def test_refused_body_is_not_sent():
    server = Server(normalised, admits=0)

    async def play(port: int) -> None:
        wire = await Wire.open(port)
        answered = await Post("/v1/layer_norm", 2**20, PARAMETERS).by(wire, waits_for_leave=True)
        assert (answered.status, answered.stays_open) == (429, False)
        wire.leave()

    against(server, play)
    assert server.bodies == 0


def test_open_loop_tells_what_was_served_from_what_was_refused():
    async def play(port: int) -> None:
        tally = await _open_loop(port, Post("/v1/layer_norm", 2**12, PARAMETERS), 200, 0.1)
        assert (len(tally.served), len(tally.refused), tally.other, tally.broken) == (5, 15, 0, 0)

    against(Server(normalised, admits=5), play)


def test_quantiles():
    assert _quantile([3, 1, 2], 0.5) == 2
    assert _quantile(range(100), 0.99) == 99
    assert _quantile([], 0.99) == 0
