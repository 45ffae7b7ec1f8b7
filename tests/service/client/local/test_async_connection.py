"""The asynchronous client's connection, and servers that end it."""

import asyncio
import socket
import threading
import time

import pytest
import uvloop
from normserve.client import ConnectionFailedError
from normserve.client.local.async_connection import AsyncLocalClientConnection
from normserve.client.local.client_protocol import LocalRequest
from normserve.codec import local_messages as frames

from tests.service.client.local.test_connection import serving

INFO = frames.encode_frame(0, frames.GetInfoMessage())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_request_that_the_server_closed_without_reading_fails_at_once(tmp_path, loop):
    path = str(tmp_path / "server.sock")

    def serve(listener):
        connected, _ = listener.accept()
        with connected:
            connected.recv(2**16)
            connected.send(frames.encode_frame(2, frames.LocalResponse(200, document={})))
            while len(connected.recv(2 * len(INFO), socket.MSG_PEEK)) < 2 * len(INFO):
                time.sleep(0.001)
            connected.recv(len(INFO))
            connected.send(frames.encode_frame(3, frames.LocalResponse(200, document={})))

    async def run():
        link = AsyncLocalClientConnection(None)
        await link.connect(path)
        answered, unread = await asyncio.gather(
            *[asyncio.wait_for(link.send_and_wait(LocalRequest(frames.GetInfoMessage())), 10) for _ in range(2)],
            return_exceptions=True,
        )
        assert answered.status == 200
        assert isinstance(unread, ConnectionFailedError)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        loop(run())
        thread.join()


def test_requests_that_the_kernel_does_not_take_at_once_are_sent_in_their_order(tmp_path):
    located = {str(number): frames.TensorReference(0, 0, "x" * 200, (1,)) for number in range(200)}
    heard = []

    def answer(connected, tag, message):
        heard.append(tag)
        connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, document=len(message.tensors))))

    async def run(path):
        link = AsyncLocalClientConnection(None)
        await link.connect(path)
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        request = LocalRequest(frames.ComputeMessage("layer_norm", located, {}))
        replies = await asyncio.wait_for(asyncio.gather(*[link.send_and_wait(request) for _ in range(5)]), 20)
        assert [reply.document for reply in replies] == 5 * [200]
        assert heard == sorted(heard)
        link.close_when_unused()

    path = str(tmp_path / "server.sock")
    with serving(path, answer):
        asyncio.run(run(path))


def test_a_task_that_waits_while_the_connection_is_given_back_is_told_at_once(tmp_path):
    async def run(path):
        link = AsyncLocalClientConnection(None)
        await link.connect(path)
        waiting = asyncio.create_task(link.send_and_wait(LocalRequest(frames.GetInfoMessage())))
        await asyncio.sleep(0)
        link.close_when_unused()
        with pytest.raises(ConnectionFailedError):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(ConnectionFailedError):
            await link.send_and_wait(LocalRequest(frames.GetInfoMessage()))

    path = str(tmp_path / "server.sock")
    with serving(path, lambda *_: None):
        asyncio.run(run(path))
