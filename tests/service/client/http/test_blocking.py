"""Threads receive in calls of the system's that wait, for no longer than there is time."""

import socket
import struct
import threading

import httpx
import pytest
from normserve.client.deadlines import Deadline
from normserve.client.http.blocking import filling
from normserve.client.http.waits import WholeCall

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


def test_what_comes_first_is_enough_unless_all_is_wanted(pair):
    ours, theirs = pair
    fill = filling(WholeCall(Deadline(30)))
    room = memoryview(bytearray(8))
    theirs.send(b"abc")
    assert fill(ours, room, whole=False) == 3
    theirs.send(b"def")
    rest = threading.Timer(0.01, theirs.send, (b"gh",))
    rest.start()
    assert fill(ours, room[3:], whole=True) == 5
    rest.join()
    assert bytes(room) == b"abcdefgh"
    theirs.close()
    assert fill(ours, room, whole=True) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_no_longer_than_there_is_time_and_the_next_has_the_usual_patience(pair, whole):
    ours, _ = pair
    with pytest.raises(httpx.ReadTimeout):
        filling(WholeCall(Deadline(0.02)))(ours, memoryview(bytearray(8)), whole=whole)
    assert patience_s(ours) == pytest.approx(_PATIENCE_S, abs=0.1)


def test_there_is_time_when_the_systems_patience_is_over(pair):
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    late = threading.Timer(0.05, theirs.send, (b"abc",))
    late.start()
    assert filling(WholeCall(Deadline(30)))(ours, memoryview(bytearray(8)), whole=False) == 3
    late.join()
