"""How a client waits for an answer: by polling where the last one came soon, asleep otherwise."""

import socket
import threading
import time

import pytest
from normserve.client.local import connection
from normserve.client.local.connection import PollingReceiver

ANSWER = b"an answer"


class Polled:
    """A socket that counts how it is received from."""

    def __init__(self, connected):
        self._connected = connected
        self.at_once = self.waiting = 0

    def recvmsg(self, nbytes, rights, flags):
        if flags & socket.MSG_DONTWAIT:
            self.at_once += 1
        else:
            self.waiting += 1
        return self._connected.recvmsg(nbytes, rights, flags)


@pytest.fixture
def ends(monkeypatch):
    """The client's end, counted, with what comes in on it, and the server's."""
    monkeypatch.setattr(connection, "_MAY_POLL", True)
    # However slow this machine is now.
    monkeypatch.setattr(connection, "_SOON_S", 20.0)
    ours, theirs = socket.socketpair()
    polled = Polled(ours)
    with ours, theirs:
        yield polled, PollingReceiver(polled), theirs


def received(incoming):
    return incoming.receive()[0]


def test_after_an_answer_that_came_soon_the_next_one_is_polled_for(ends):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    assert received(incoming) == ANSWER
    assert (polled.at_once, polled.waiting) == (0, 1)
    theirs.send(ANSWER)
    assert received(incoming) == ANSWER
    assert (polled.at_once, polled.waiting) == (1, 1)


def test_an_answer_that_does_not_come_soon_is_waited_for_and_so_is_the_next(ends, monkeypatch):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(connection, "_SOON_S", 0.0)
    monkeypatch.setattr(connection, "_POLLED_S", 0.0)
    with pytest.raises(BlockingIOError):
        incoming.receive()
    assert not incoming.is_prompt
    thread = threading.Thread(target=lambda: (time.sleep(0.05), theirs.send(ANSWER)))
    thread.start()
    assert received(incoming) == ANSWER
    thread.join()
    tried = polled.at_once
    assert polled.waiting == 2
    theirs.send(ANSWER)
    assert received(incoming) == ANSWER
    assert (polled.at_once, polled.waiting) == (tried, 3)


def test_for_how_long_an_answer_was_polled_for_counts_as_waiting(ends, monkeypatch):
    _, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(connection, "_POLLED_S", 0.001)
    with pytest.raises(BlockingIOError):
        incoming.receive()
    monkeypatch.setattr(connection, "_SOON_S", 0.0005)
    theirs.send(ANSWER)
    assert received(incoming) == ANSWER
    assert not incoming.is_prompt


def test_other_threads_run_while_an_answer_is_polled_for(ends, monkeypatch):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(connection, "_POLLED_S", 20.0)

    def answer():
        while polled.at_once < 2:
            time.sleep(0.001)
        theirs.send(ANSWER)

    thread = threading.Thread(target=answer)
    thread.start()
    assert received(incoming) == ANSWER
    thread.join()
    assert polled.at_once > 1
    assert polled.waiting == 1


def test_an_end_is_noticed_while_polling(ends):
    _, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    theirs.close()
    assert received(incoming) == b""


def test_nothing_is_polled_for_on_one_core(ends, monkeypatch):
    polled, incoming, theirs = ends
    monkeypatch.setattr(connection, "_MAY_POLL", False)
    for _ in range(3):
        theirs.send(ANSWER)
        incoming.receive()
    assert polled.at_once == 0
