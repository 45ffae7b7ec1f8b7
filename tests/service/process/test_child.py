"""When a process of a fleet counts as ready, quiet or hung, and what becomes of its connections when it ends."""

import asyncio
import logging
import signal
import socket

import pytest
from normserve.process import child
from normserve.process.child import OWNER, ChildSlot, HandedConnection
from normserve.process.supervisor_channel import BEAT_S, MESSAGE, NOT_READY, READY, REFUSED, ReportReader


class Running:
    """A process that was started."""

    returncode = None
    pid = 4711

    def __init__(self) -> None:
        self.kills = 0

    def kill(self, pid: int, number: int) -> None:
        assert (pid, number) == (self.pid, signal.SIGKILL)
        self.kills += 1


class Channel:
    """Says what a test has it say."""

    def __init__(self) -> None:
        self.said = b""

    def recv(self, count: int) -> bytes:
        return self.said


@pytest.fixture
def running(monkeypatch):
    running = Running()
    monkeypatch.setattr(child.os, "kill", running.kill)
    return running


@pytest.fixture
def process(running):
    process = ChildSlot("process 0", OWNER, lambda restarts: restarts, "cpu", hang_s=10)
    process._channel, process._subprocess = Channel(), running
    return process


def say(process: ChildSlot, *numbers: int) -> None:
    process._channel.said = b"".join(map(MESSAGE.pack, numbers))
    process._receive_reports(process._channel, ReportReader())


def wait(process: ChildSlot, seconds: float) -> None:
    for _ in range(round(seconds / BEAT_S)):
        process.add_silence(BEAT_S)


def test_what_it_said_last_is_what_it_is(process):
    assert process.is_reachable
    assert not process.is_ready
    say(process, NOT_READY, READY)
    assert process.is_ready
    say(process, READY, NOT_READY)
    assert not process.is_ready
    assert process.is_reachable


def test_it_says_that_it_refused_a_connection(process):
    refused = []
    process.on_refused = refused.append
    say(process, READY, REFUSED["max_connections"], NOT_READY)
    assert refused == ["max_connections"]
    assert not process.is_ready


def test_one_that_starts_may_be_silent(process, running):
    wait(process, 1000)
    assert process.is_reachable
    say(process, NOT_READY)
    wait(process, 1000)
    assert running.kills == 0


def test_one_that_is_silent_gets_no_connections_until_it_speaks(process, running, caplog):
    caplog.set_level(logging.INFO, "normserve")
    say(process, READY)
    wait(process, 2.5)
    assert process.is_ready
    wait(process, 1)
    assert not process.is_ready
    assert not process.is_reachable
    say(process, READY)
    assert process.is_ready
    assert running.kills == 0
    assert [each.message for each in caplog.records] == [
        "process 0 gives no sign and gets no new connections",
        "process 0 gives signs again",
    ]
    assert [each.fields for each in caplog.records] == [{"child": "process 0", "device": "cpu", "pid": 4711}] * 2


def test_one_that_hangs_is_killed_once(process, running):
    say(process, READY)
    wait(process, 9.5)
    assert running.kills == 0
    wait(process, 20)
    assert running.kills == 1


def test_one_that_drains_and_hangs_is_killed_too(process, running):
    say(process, READY)
    say(process, NOT_READY)
    wait(process, 10)
    assert running.kills == 1


def test_one_that_has_ended_is_not_killed(process, running):
    say(process, READY)
    running.returncode = 0
    wait(process, 20)
    assert running.kills == 0


@pytest.fixture
def channel():
    """Both ends of a channel: the supervisor's and the process's."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield here, there


class Connections:
    """Hands a process connections of clients, and notes what becomes of them."""

    def __init__(self, process: ChildSlot) -> None:
        self._process = process
        self.ended: list[int] = []
        self.returned: dict[int, socket.socket] = {}
        self.clients: list[socket.socket] = []

    def hand_over(self, number: int) -> None:
        accepted, client = socket.socketpair()
        client.setblocking(False)
        self.clients.append(client)

        def take_back(connection: socket.socket) -> None:
            self.returned[number] = connection

        assert self._process.hand_over_connection(
            number, HandedConnection(accepted, lambda: self.ended.append(number), take_back)
        )


@pytest.fixture
def connections(process):
    connections = Connections(process)
    yield connections
    for each in [*connections.clients, *connections.returned.values()]:
        each.close()


def test_a_connection_is_the_process_s_alone_once_it_has_received_it(process, channel, connections):
    process._channel = channel[0]
    connections.hand_over(7)
    _, (descriptor,), _, _ = socket.recv_fds(channel[1], 8, 1)
    with socket.socket(fileno=descriptor):
        channel[1].send(MESSAGE.pack(7))
        process._receive_reports(channel[0], ReportReader())
    # No copy of it is left open here.
    assert connections.clients[0].recv(1) == b""
    assert connections.ended == []
    channel[1].send(MESSAGE.pack(7))
    process._receive_reports(channel[0], ReportReader())
    assert connections.ended == [7]
    assert process._connections == {}


# Reads its start message, receives the first of two connections and ends; its last message may still be unread.
_RECEIVES_ONE = """
import pickle, socket, sys
pickle.load(sys.stdin.buffer)
channel = socket.socket(fileno=int(sys.argv[1]))
number = socket.recv_fds(channel, 8, 1)[0]
channel.send(number)
"""


def test_connections_that_a_process_had_not_received_are_taken_back(monkeypatch, tmp_path):
    (tmp_path / "receives_one.py").write_text(_RECEIVES_ONE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = ChildSlot("process 0", "receives_one", lambda restarts: restarts, "cpu", hang_s=10)
    connections = Connections(process)

    def hand_over() -> None:
        for number in (1, 2):
            connections.hand_over(number)

    process.on_start = hand_over
    assert asyncio.run(process.run_process()) == 0
    assert connections.ended == [1]
    assert list(connections.returned) == [2]
    first, second = connections.clients
    assert first.recv(1) == b""
    connections.returned[2].send(b"a")
    assert second.recv(1) == b"a"
    for each in (first, second, connections.returned[2]):
        each.close()
