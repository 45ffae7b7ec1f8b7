"""How a client waits for an answer: by polling where the last one came soon, asleep otherwise."""

import fcntl
import gc
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from normserve.client.answers.reception import DOCUMENT_BYTES
from normserve.client.errors import ConnectionFailedError, UnexpectedAnswerError
from normserve.client.local import sockets
from normserve.client.local.arena import Arena
from normserve.client.local.sockets import Incoming
from normserve.codec import local_frames as frames

ANSWER = frames.write(7, frames.Answer(200))


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
    monkeypatch.setattr(sockets, "_MAY_POLL", True)
    # However slow this machine is now.
    monkeypatch.setattr(sockets, "_SOON_S", 20.0)
    ours, theirs = socket.socketpair()
    polled = Polled(ours)
    with ours, theirs:
        yield polled, Incoming(polled, Arena()), theirs


def tags(incoming):
    return [tag for tag, _ in incoming.receive()]


def test_after_an_answer_that_came_soon_the_next_one_is_polled_for(ends):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    assert tags(incoming) == [7]
    assert (polled.at_once, polled.waiting) == (0, 1)
    theirs.send(ANSWER)
    assert tags(incoming) == [7]
    assert (polled.at_once, polled.waiting) == (1, 1)


def test_an_answer_that_does_not_come_soon_is_waited_for_and_so_is_the_next(ends, monkeypatch):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(sockets, "_SOON_S", 0.0)
    monkeypatch.setattr(sockets, "_POLLED_S", 0.0)
    thread = threading.Thread(target=lambda: (time.sleep(0.05), theirs.send(ANSWER)))
    thread.start()
    with pytest.raises(BlockingIOError):
        incoming.receive()
    assert not incoming.is_soon
    assert tags(incoming) == [7]
    thread.join()
    tried = polled.at_once
    assert polled.waiting == 2
    theirs.send(ANSWER)
    assert tags(incoming) == [7]
    assert (polled.at_once, polled.waiting) == (tried, 3)


def test_for_how_long_an_answer_was_polled_for_counts_as_waiting(ends, monkeypatch):
    _, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(sockets, "_POLLED_S", 0.001)
    with pytest.raises(BlockingIOError):
        incoming.receive()
    monkeypatch.setattr(sockets, "_SOON_S", 0.0005)
    theirs.send(ANSWER)
    assert tags(incoming) == [7]
    assert not incoming.is_soon


def test_other_threads_run_while_an_answer_is_polled_for(ends, monkeypatch):
    polled, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    monkeypatch.setattr(sockets, "_POLLED_S", 20.0)
    thread = threading.Thread(target=lambda: (time.sleep(0.02), theirs.send(ANSWER)))
    thread.start()
    assert tags(incoming) == [7]
    thread.join()
    assert polled.at_once > 1
    assert polled.waiting == 1


def test_an_end_is_noticed_while_polling(ends):
    _, incoming, theirs = ends
    theirs.send(ANSWER)
    incoming.receive()
    theirs.close()
    with pytest.raises(ConnectionFailedError):
        incoming.receive()


def test_nothing_is_polled_for_on_one_core(ends, monkeypatch):
    polled, incoming, theirs = ends
    monkeypatch.setattr(sockets, "_MAY_POLL", False)
    for _ in range(3):
        theirs.send(ANSWER)
        incoming.receive()
    assert polled.at_once == 0


SEGMENT = 2**20


def send_segment(theirs, tag, answer, nbytes=SEGMENT, count=1, part=slice(None)):
    """An answer, or a part of one, and descriptors of new memory with it, none of which is allocated yet."""
    descriptors = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(count)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(theirs, [frames.write(tag, answer)[part]], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def descriptors():
    """How many descriptors this process has; as many when the test is over."""

    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    yield count
    gc.collect()
    assert count() == before


@pytest.fixture
def incoming(descriptors):
    """What comes in from a server that was asked for one segment, and the server's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arena = Arena()
        incoming = Incoming(ours, arena)
        incoming.expect(7, frames.Grow(SEGMENT))
        yield incoming, theirs
        incoming.close()
        arena._parts.clear()


def test_of_a_segment_only_what_was_requested_is_mapped(incoming):
    received, theirs = incoming
    # More than any machine has: it is neither allocated nor mapped.
    send_segment(theirs, 7, frames.Answer(200, segment=0), nbytes=2**40)
    assert tags(received) == [7]
    assert received._arena.nbytes == SEGMENT


@pytest.mark.parametrize(
    ("tag", "answer", "options"),
    [
        (7, frames.Answer(200, segment=0), {"nbytes": SEGMENT - 4096}),
        (7, frames.Answer(200, segment=0), {"count": 0}),
        (7, frames.Answer(200, segment=0), {"count": 2}),
        (8, frames.Answer(200, segment=0), {}),
        (0, frames.Answer(200, segment=0), {}),
        (7, frames.Answer(200, segment=0, device="ab", nbytes=SEGMENT), {}),
        (7, frames.Answer(200), {}),
    ],
    ids=["smaller", "without", "two", "another tag", "no tag", "on a device", "no number"],
)
def test_segments_that_were_not_requested_are_refused(incoming, tag, answer, options):
    received, theirs = incoming
    send_segment(theirs, tag, answer, **options)
    with pytest.raises(UnexpectedAnswerError):
        received.receive()
    assert received._arena.nbytes == 0


def test_the_descriptor_of_an_answer_without_a_segment_is_closed(incoming, descriptors):
    received, theirs = incoming
    before = descriptors()
    send_segment(theirs, 7, frames.Answer(429))
    assert tags(received) == [7]
    assert descriptors() == before
    # The request is answered: what comes later is another's.
    send_segment(theirs, 7, frames.Answer(200, segment=0))
    with pytest.raises(UnexpectedAnswerError, match="not requested"):
        received.receive()


def test_a_segment_is_taken_once_for_each_request(incoming):
    received, theirs = incoming
    send_segment(theirs, 7, frames.Answer(200, segment=0))
    assert tags(received) == [7]
    send_segment(theirs, 7, frames.Answer(200, segment=1))
    with pytest.raises(UnexpectedAnswerError):
        received.receive()
    assert received._arena.nbytes == SEGMENT


def test_descriptors_that_come_with_parts_of_an_answer_do_not_pile_up(incoming, descriptors):
    received, theirs = incoming
    before = descriptors()
    answer = frames.Answer(200, "x" * 100, segment=0)
    send_segment(theirs, 7, answer, part=slice(0, 1))
    assert received.receive() == []
    assert descriptors() == before + 1
    send_segment(theirs, 7, answer, part=slice(1, 2))
    with pytest.raises(UnexpectedAnswerError, match="not requested"):
        received.receive()


def test_only_a_list_may_be_long(incoming):
    received, theirs = incoming
    head = frames.PREFIX.pack(DOCUMENT_BYTES + 1, 9)
    received.expect(9, frames.Layers())
    theirs.send(head)
    assert received.receive() == []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received = Incoming(ours, Arena())
        received.expect(9, frames.Info())
        theirs.send(head)
        with pytest.raises(UnexpectedAnswerError, match="at most"):
            received.receive()


def test_a_segment_on_a_device_is_no_smaller_than_requested(incoming):
    received, theirs = incoming
    opened = []
    received.on_device_segment = lambda number, descriptor, nbytes: opened.append((number, nbytes))
    for tag in (1, 2):
        received.expect(tag, frames.Grow(SEGMENT, "device"))
    send_segment(theirs, 1, frames.Answer(200, segment=0, device="ab", nbytes=2 * SEGMENT))
    received.receive()
    assert opened == [(0, 2 * SEGMENT)]
    send_segment(theirs, 2, frames.Answer(200, segment=1, device="ab", nbytes=SEGMENT - 1))
    with pytest.raises(UnexpectedAnswerError, match="at least"):
        received.receive()
