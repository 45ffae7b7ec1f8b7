"""Steps that an event loop drives."""

import asyncio
import socket

import pytest
import uvloop
from normserve.client.http.async_connection_pool import run_steps
from normserve.client.http.socket_steps import READ


def receiving(connected, count):
    """Receive so many bytes one by one."""
    received = b""
    while len(received) < count:
        yield connected.fileno(), READ
        received += connected.recv(1)
    return received


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_an_answer_comes_whole_from_a_server_that_has_closed_before_it_read_the_request(loop):
    async def run():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.send(b"the rest of a request")
            theirs.send(b"answer")
            theirs.close()
            assert await asyncio.wait_for(run_steps(receiving(ours, 6)), 10) == b"answer"

    loop(run())
