"""A serving process and the one that accepts connections for it: connections come, and readiness goes back."""

import asyncio
import socket

import pytest
import uvloop
from normserve.process import supervisor_channel
from normserve.process.supervisor_channel import (
    LINK,
    NOT_READY,
    READY,
    REFUSED,
    RESTARTED,
    ReportReader,
    SupervisorChannel,
    encode_connection,
    send_with_socket,
)


@pytest.fixture
def sockets():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield here, there


class Process:
    """What a channel tells of."""

    def __init__(self, channel: socket.socket) -> None:
        self.is_stalled = False
        self.came: list[tuple[socket.socket, object, str | None]] = []
        self.refused: list[str] = []
        self.restarted: list[int] = []
        self.is_alone = asyncio.Event()
        self.links = []
        self.channel = SupervisorChannel(
            channel,
            is_stalled=lambda: self.is_stalled,
            on_connection=lambda *come: self.came.append(come),
            on_refused=self.refused.append,
            on_restarted=self.restarted.append,
            on_link=self.links.append,
            on_closed=self.is_alone.set,
        )


def test_a_process_says_whether_it_finishes_work(sockets):
    process = Process(sockets[0])
    process.channel._send_readiness()
    process.channel.report_readiness(ready=True)
    assert ReportReader().feed(sockets[1].recv(64)) == [NOT_READY, READY]
    process.is_stalled = True
    process.channel._send_readiness()
    assert ReportReader().feed(sockets[1].recv(64)) == [NOT_READY]
    process.is_stalled = False
    process.channel._send_readiness()
    process.channel.report_readiness(ready=False)
    assert ReportReader().feed(sockets[1].recv(64)) == [READY, NOT_READY]


def test_signs_do_not_pile_up_while_nobody_hears_them(sockets):
    async def play() -> None:
        channel = Process(sockets[0]).channel
        while not channel._report_writer.is_backlogged:
            channel._report_readiness_regularly()
        before = len(channel._report_writer._unsent)
        for _ in range(100):
            channel._report_readiness_regularly()
        assert len(channel._report_writer._unsent) == before
        asyncio.get_running_loop().remove_writer(sockets[0])

    asyncio.run(play())


def test_signs_come_as_long_as_the_event_loop_runs(sockets, monkeypatch):
    monkeypatch.setattr(supervisor_channel, "BEAT_S", 0.001)

    async def play() -> None:
        process = Process(sockets[0])
        process.channel.report_readiness(ready=True)
        process.channel.start()
        heard = ReportReader()
        signs = 0
        while signs < 5:
            signs += len(heard.feed(await asyncio.to_thread(sockets[1].recv, 64)))
        asyncio.get_running_loop().remove_reader(sockets[0])

    sockets[1].settimeout(10)
    asyncio.run(play())


def test_connections_refusals_and_the_end_are_told(sockets):
    async def play() -> None:
        process = Process(sockets[0])
        process.channel.start()
        accepted, client = socket.socketpair()
        with accepted, client:
            send_with_socket(sockets[1], REFUSED["max_connections"])
            send_with_socket(sockets[1], LINK, accepted)
            send_with_socket(sockets[1], encode_connection(7, "max_connections"), accepted)
            # The descriptors of these were lost on the way.
            send_with_socket(sockets[1], 8)
            send_with_socket(sockets[1], LINK)
            sockets[1].shutdown(socket.SHUT_WR)
            await asyncio.wait_for(process.is_alone.wait(), 10)
            ((connection, on_end, beyond),) = process.came
            assert beyond == "max_connections"
            with connection:
                client.sendall(b"first")
                assert connection.recv(16) == b"first"
                assert not connection.getblocking()
            process.channel.report_refused_connection("max_connections_per_address")
            process.channel.request_link()
            on_end()
            (link,) = process.links
            link.close()
        assert process.refused == ["max_connections"]
        refused = REFUSED["max_connections_per_address"]
        assert ReportReader().feed(sockets[1].recv(64)) == [NOT_READY, 7, 8, 8, LINK, refused, LINK, 7]

    asyncio.run(play())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_the_end_of_a_process_that_has_left_reports_unread_is_told(loop):
    async def play() -> None:
        here, there = socket.socketpair()
        here.setblocking(False)
        with here:
            process = Process(here)
            process.channel.start()
            for _ in range(3):
                send_with_socket(there, REFUSED["max_connections"])
            for child in (1, 0, 1):
                send_with_socket(there, RESTARTED + child)
            there.close()
            await asyncio.wait_for(process.is_alone.wait(), 10)
        assert process.refused == 3 * ["max_connections"]
        assert process.restarted == [1, 0, 1]

    loop(play())
