"""Readers on event loops, and peers that close."""

import asyncio
import socket

import pytest
import uvloop
from normserve.socket_readers import add_persistent_reader, has_error


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_unread", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_all_bytes_and_the_end_of_a_peer_that_closed_are_received(run, is_unread, writes):
    async def play():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        received = []
        ended = asyncio.Event()

        def receive():
            try:
                data = ours.recv(1)
            except ConnectionResetError:
                data = b""
            if data:
                received.append(data)
                return
            loop.remove_reader(ours)
            loop.remove_writer(ours)
            ended.set()

        with ours:
            ours.setblocking(False)
            if is_unread:
                ours.send(b"not read")
            add_persistent_reader(loop, ours, receive)
            if writes:
                loop.add_writer(ours, lambda: None)
            theirs.send(b"abc")
            theirs.close()
            await asyncio.wait_for(ended.wait(), 10)
        assert received == [b"a", b"b", b"c"]

    run(play())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reader_that_is_removed_is_not_called_any_more(run):
    async def play():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        received = []

        def receive():
            received.append(ours.recv(1))
            loop.remove_reader(ours)

        with ours:
            ours.send(b"not read")
            add_persistent_reader(loop, ours, receive)
            theirs.send(b"abc")
            theirs.close()
            await asyncio.sleep(0.02)
        assert received == [b"a"]

    run(play())


def test_an_error_stays_until_it_is_received():
    ours, theirs = socket.socketpair()
    with ours:
        ours.send(b"not read")
        theirs.send(b"a")
        assert not has_error(ours.fileno())
        theirs.close()
        for _ in range(2):
            assert has_error(ours.fileno())
        assert ours.recv(1) == b"a"
        with pytest.raises(ConnectionResetError):
            ours.recv(1)
        assert not has_error(ours.fileno())
