"""Threads receive in calls of the system's that wait, for no longer than there is time."""

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from normserve.client.deadlines import Deadline
from normserve.client.http.connection_pool import ConnectionPool, make_blocking_receiver
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import TlsSettings

_PATIENCE_S = 1


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _PATIENCE_S, 0))
    with ours, theirs:
        yield ours, theirs


def patience_s(connected: socket.socket) -> float:
    size = struct.calcsize("@ll")
    seconds, microseconds = struct.unpack("@ll", connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, size))
    return seconds + microseconds / 1e6


class RecordingSocket(socket.socket):
    """Keeps the flags of its calls."""

    flags: list[int]

    def recv_into(self, *arguments):
        self.flags.append(arguments[2])
        return super().recv_into(*arguments)


def test_what_comes_first_is_enough_unless_all_is_wanted(pair):
    connected, theirs = pair
    fill = make_blocking_receiver(Deadline(30))
    room = memoryview(bytearray(8))
    with RecordingSocket(fileno=connected.detach()) as ours:
        ours.flags = []
        theirs.send(b"abc")
        assert fill(ours, room, until_full=False) == 3
        assert ours.flags == [0]
        theirs.send(b"defgh")
        # A signal may end such a call early: who wants all asks for the rest.
        received = 3
        while received < 8:
            received += fill(ours, room[received:], until_full=True)
        assert set(ours.flags[1:]) == {socket.MSG_WAITALL}
        assert bytes(room) == b"abcdefgh"
        theirs.close()
        assert fill(ours, room, until_full=True) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_no_longer_than_there_is_time_and_the_next_has_the_usual_patience(pair, whole):
    ours, _ = pair
    with pytest.raises(httpx.ReadTimeout):
        make_blocking_receiver(Deadline(0.02))(ours, memoryview(bytearray(8)), until_full=whole)
    assert patience_s(ours) == pytest.approx(_PATIENCE_S, abs=0.1)


def test_there_is_time_when_the_systems_patience_is_over(pair):
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    late = threading.Timer(0.05, theirs.send, (b"abc",))
    late.start()
    assert make_blocking_receiver(Deadline(30))(ours, memoryview(bytearray(8)), until_full=False) == 3
    late.join()


@pytest.fixture
def address():
    """Where connections can be made."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield ServerAddress("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def nowhere():
    """Where none can be made."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield ServerAddress("127.0.0.1", taken.getsockname()[1])


@pytest.fixture
def sockets(address):
    made = ConnectionPool(address, TlsSettings(False), 2, 30.0)
    yield made
    made.close()


def late():
    return Deadline(0.02)


def in_time():
    return Deadline(60)


def room(sockets) -> int:
    """How many connections can be taken now."""
    taken = []
    try:
        while True:
            taken.append(sockets.acquire(late())[0])
    except httpx.PoolTimeout:
        return len(taken)
    finally:
        for each in taken:
            sockets.release(each)


def test_so_many_connections_are_in_use_at_once_and_no_more(sockets):
    assert room(sockets) == 2
    assert room(sockets) == 2


def test_who_waited_in_vain_takes_nothing(sockets):
    taken = [sockets.acquire(in_time())[0] for _ in range(2)]
    for _ in range(3):
        with pytest.raises(httpx.PoolTimeout):
            sockets.acquire(late())
    for each in taken:
        sockets.release(each)
    assert room(sockets) == 2


def test_a_connection_that_cannot_be_made_takes_no_place(nowhere):
    sockets = ConnectionPool(nowhere, TlsSettings(False), 2, 30.0)
    for _ in range(5):
        with pytest.raises(httpx.ConnectError):
            sockets.acquire(in_time())
    sockets.close()


def test_who_waits_is_woken_by_whoever_gives_back(sockets):
    taken = [sockets.acquire(in_time())[0] for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(sockets.acquire, in_time()) for _ in range(2)]
        for each in taken:
            sockets.release(each)
        again = [each.result(20) for each in waiting]
    assert [was_used for _, was_used in again] == [True, True]
    for each, _ in again:
        sockets.release(each)
    assert room(sockets) == 2


def test_what_comes_back_to_a_closed_client_is_closed(sockets):
    connection, _ = sockets.acquire(in_time())
    idle, _ = sockets.acquire(in_time())
    sockets.release(idle)
    sockets.close()
    assert not idle.is_reusable
    assert connection.is_reusable
    sockets.release(connection)
    assert not connection.is_reusable
    for _ in range(3):
        with pytest.raises(RuntimeError, match="closed"):
            sockets.acquire(late())


def test_a_connection_that_must_be_new_is(sockets):
    kept, _ = sockets.acquire(in_time())
    sockets.release(kept)
    fresh, was_used = sockets.acquire(in_time(), fresh=True)
    assert (fresh is kept, was_used) == (False, False)
    sockets.release(fresh)
