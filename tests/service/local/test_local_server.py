"""Connected sockets from their first to their last byte."""

import asyncio
import os
import socket

import pytest
import uvloop
from normserve.local import local_server
from normserve.local.local_server import LocalServer
from normserve.local.local_session import AllowedLocalUsers

from tests.service.local.fake_wire import Client


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_connection_whose_client_has_gone_unnoticed_is_swept(loop, monkeypatch):
    monkeypatch.setattr(local_server, "_SWEEP_S", 0.01)

    async def run():
        serving = LocalServer(Client().service, AllowedLocalUsers(""), frame_s=5, send_s=5)
        ended = []
        pairs = [socket.socketpair() for _ in range(2)]
        for number, (_, ours) in enumerate(pairs):
            serving.start_connection(ours, lambda number=number: ended.append(number))
        # Nothing tells of the end of the first one any more.
        asyncio.get_running_loop().remove_reader(pairs[0][1])
        pairs[0][0].close()
        await asyncio.wait_for(until(lambda: ended), 20)
        await asyncio.sleep(0.05)
        assert ended == [0]
        assert serving.connection_count == 1
        await serving.close(1)
        assert ended == [0, 1]
        pairs[1][0].close()

    loop(run())


@pytest.mark.parametrize("fails", ["user", "socket"])
def test_a_connection_that_is_refused_is_closed_and_its_place_is_free_again(fails, monkeypatch):
    def gone(*_):
        raise OSError("the client has gone")

    async def run():
        if fails == "socket":
            monkeypatch.setattr(local_server.PeerProcess, "from_socket", gone)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 4242)
        serving = LocalServer(Client().service, AllowedLocalUsers(""), frame_s=5, send_s=5)
        ended = []
        theirs, ours = socket.socketpair()
        with theirs:
            theirs.settimeout(5)
            serving.start_connection(ours, lambda: ended.append(1))
            assert (ended, serving.connection_count, ours.fileno()) == ([1], 0, -1)
            said = theirs.recv(2**16)
            assert (b"403" in said) == (fails == "user")
            assert not said or theirs.recv(1) == b""
        await serving.close(1)

    asyncio.run(run())
