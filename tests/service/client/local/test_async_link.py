"""The asynchronous client's connection, and servers that end it."""

import asyncio
import socket
import threading
import time

import pytest
import uvloop
from normserve.client import ConnectionFailedError
from normserve.client.local.async_link import AsyncLink
from normserve.client.local.protocol import LocalRequest
from normserve.codec import local_frames as frames

INFO = frames.write(0, frames.Info())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_request_that_the_server_closed_without_reading_fails_at_once(tmp_path, loop):
    path = str(tmp_path / "server.sock")

    def serve(listener):
        connected, _ = listener.accept()
        with connected:
            connected.recv(2**16)
            connected.send(frames.write(2, frames.Answer(200, document={})))
            while len(connected.recv(2 * len(INFO), socket.MSG_PEEK)) < 2 * len(INFO):
                time.sleep(0.001)
            connected.recv(len(INFO))
            connected.send(frames.write(3, frames.Answer(200, document={})))

    async def run():
        link = AsyncLink(None)
        await link.connect(path)
        answered, unread = await asyncio.gather(
            *[asyncio.wait_for(link.request(LocalRequest(frames.Info())), 10) for _ in range(2)],
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
