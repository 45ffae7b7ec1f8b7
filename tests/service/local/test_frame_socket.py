"""A connection's socket: frames that come in parts, frames that wait to be read, descriptors, and the end."""

import asyncio
import contextlib
import functools
import os
import socket

import pytest
import uvloop
from normserve.codec.local_messages import MAX_FRAME_BYTES, PREFIX
from normserve.local import frame_socket as wire_module
from normserve.local.frame_socket import FrameSocket


class Told:
    """What a wire's listener is told."""

    def __init__(self):
        self.frames, self.faults, self.ends = [], [], 0
        self.seconds = []
        self.wire = None

    def on_frame(self, first_tag, content, began, ended):
        assert began <= ended
        self.frames.append((first_tag, bytes(content)))
        self.seconds.append(ended - began)

    def on_fault(self, error):
        self.faults.append(error)
        self.wire.close()

    def on_end(self):
        self.ends += 1


def wired(body, loop=asyncio.run, **options):
    """Run `body(wire, told, theirs)` with a wire on one end of a pair of sockets.

    Args: loop: runs the event loop.
    """

    async def run():
        ours, theirs = socket.socketpair()
        told = Told()
        told.wire = wire = FrameSocket(ours, told, **{"frame_s": 20.0, "send_s": 20.0, "most_unsent": 2} | options)
        wire.set_receiving(wanted=True)
        with theirs:
            theirs.settimeout(20)
            await body(wire, told, theirs)
            wire.close()
            wire.close()
        assert told.ends == 1

    loop(asyncio.wait_for(run(), 20))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def frame(tag, content):
    return PREFIX.pack(len(content), tag) + content


def test_frames_come_in_any_parts():
    async def body(wire, told, theirs):
        data = frame(1, b"abc") + frame(2, b"") + frame(3, b"d")
        for index in range(len(data)):
            theirs.send(data[index : index + 1])
            await asyncio.sleep(0)
        await until(lambda: len(told.frames) == 3)
        theirs.send(data)
        await until(lambda: len(told.frames) == 6)
        assert told.frames == 2 * [(1, b"abc"), (2, b""), (3, b"d")]

    wired(body)


class Clock:
    """Stands until the test moves it, and counts how often it is read: once for each reception."""

    def __init__(self):
        self.now, self.reads = 100.0, 0

    def perf_counter(self):
        self.reads += 1
        return self.now


def test_the_time_of_a_frame_is_from_its_first_byte_to_its_last(monkeypatch):
    monkeypatch.setattr(wire_module, "time", clock := Clock())

    async def body(wire, told, theirs):
        data = frame(1, b"abc")
        for part in (data[:3], data[3:9], data[9:] + frame(2, b"d") + data[:3], data[3:] + frame(4, b"e")):
            reads, clock.now = clock.reads, clock.now + 1
            theirs.send(part)
            await until(lambda reads=reads: clock.reads > reads)
        assert [tag for tag, _ in told.frames] == [1, 2, 1, 4]
        # What came whole took no time.
        assert told.seconds == [2, 0, 1, 0]

    wired(body)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("unsent", [0, 2**22])
def test_the_next_socket_with_the_same_descriptor_is_heard_of(loop, unsent):
    async def body(wire, told, theirs):
        running, descriptor = asyncio.get_running_loop(), wire.descriptor
        wire.send_frame(bytes(unsent))
        await asyncio.sleep(0)
        wire.close()
        ours, other = socket.socketpair()
        reads, writes = asyncio.Event(), asyncio.Event()
        with ours, other, contextlib.ExitStack() as stack:
            again = ours
            if ours.fileno() != descriptor:
                again = stack.enter_context(socket.socket(fileno=os.dup2(ours.fileno(), descriptor)))
            running.add_reader(again, reads.set)
            running.add_writer(again, writes.set)
            other.send(b"a")
            await reads.wait()
            await writes.wait()
            assert again.recv(10) == b"a"
            running.remove_reader(again)
            running.remove_writer(again)

    wired(body, loop)


def test_frames_behind_the_end_are_not_told_of():
    # One call of the system may bring many, and what the first of them leads to may end the connection.
    async def body(wire, told, theirs):
        note = told.on_frame

        def note_and_close(*arguments):
            note(*arguments)
            wire.close()

        told.on_frame = note_and_close
        theirs.send(frame(1, b"abc") + frame(2, b"def"))
        await until(lambda: told.ends)
        assert told.frames == [(1, b"abc")]

    wired(body)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_client_that_leaves_answers_unread_is_noticed(loop):
    async def body(wire, told, theirs):
        wire.send_frame(frame(1, b"an answer"))
        theirs.send(frame(2, b"abc"))
        theirs.close()
        await until(lambda: told.ends)
        assert told.frames == [(2, b"abc")]

    wired(body, loop)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_all_frames_of_a_client_that_has_left_are_read_in_time(loop):
    async def body(wire, told, theirs):
        wire.send_frame(frame(1, b"an answer"))
        wire.set_receiving(wanted=False)
        for tag in range(2):
            theirs.send(frame(tag, bytes(MAX_FRAME_BYTES // 2)))
        theirs.close()
        await asyncio.sleep(0)
        wire.set_receiving(wanted=True)
        await until(lambda: told.ends)
        assert [tag for tag, _ in told.frames] == [0, 1]

    wired(body, loop)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(
    ("sent_before", "sent_after", "read", "lost"),
    [
        (0, 0, 0, 1),
        (100, 0, 0, 1),
        (100, 0, 100, 1),
        (100, 0, 150, 1),
        (0, 0, 100, 0),
        (0, 100, 0, 0),
        (0, 100, 100, 0),
    ],
)
def test_the_last_frame_is_lost_if_the_client_closes_before_it_has_read_its_end(
    loop, sent_before, sent_after, read, lost
):
    async def body(wire, told, theirs):
        called = []
        if sent_before:
            wire.send_frame(bytes(sent_before))
        wire.send_frame(bytes(100), (), lambda: called.append(told.ends))
        if sent_after:
            wire.send_frame(bytes(sent_after))
        if read:
            theirs.recv(read)
        theirs.close()
        await until(lambda: told.ends)
        assert called == [0] * lost

    wired(body, loop)


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_full", [False, True])
def test_frames_of_a_client_that_has_left_are_read_although_nothing_can_be_sent(loop, is_full):
    async def body(wire, told, theirs):
        called = []
        if is_full:
            wire.send_frame(bytes(10**6))
        theirs.send(frame(1, b"a request") + frame(2, b"what is given back"))
        theirs.close()
        wire.send_frame(frame(1, b"an answer"), (os.memfd_create("lost"),), lambda: called.append(told.ends))
        await until(lambda: told.ends)
        assert [tag for tag, _ in told.frames] == [1, 2]
        assert called == [0]

    wired(body, loop)


def test_frames_that_were_not_sent_are_lost():
    async def body(wire, told, theirs):
        called = []
        for number in range(100):
            wire.send_frame(bytes(10_000), (os.memfd_create("lost"),), functools.partial(called.append, number))
        received = 0
        while received < 10_000:
            received += len(theirs.recv(10_000 - received))
        wire.close()
        # Those that the kernel has taken are the client's.
        assert called
        assert called == list(range(called[0], 100))
        assert called[0] > 0

    wired(body)


def test_a_frame_that_is_too_long_is_a_fault():
    async def body(wire, told, theirs):
        theirs.send(PREFIX.pack(MAX_FRAME_BYTES + 1, 1))
        await until(lambda: told.ends)
        assert len(told.faults) == 1
        assert not told.frames

    wired(body)


def test_a_frame_that_stays_cut_off_ends_the_connection():
    async def body(wire, told, theirs):
        theirs.send(frame(1, b"abc")[:-1])
        await until(lambda: told.ends)
        assert theirs.recv(1) == b""

    wired(body, frame_s=0.02)


def test_the_clock_of_a_frame_stands_still_while_nobody_reads():
    async def body(wire, told, theirs):
        theirs.send(frame(1, b"abc")[:-1])
        await asyncio.sleep(0.01)
        wire.set_receiving(wanted=False)
        await asyncio.sleep(0.4)
        assert wire.is_open
        wire.set_receiving(wanted=True)
        theirs.send(b"c")
        await until(lambda: told.frames)

    wired(body, frame_s=0.3)


def test_nothing_is_read_while_too_many_answers_wait():
    async def body(wire, told, theirs):
        big = bytes(2**20)
        for _ in range(4):
            wire.send_frame(big)
        theirs.send(frame(1, b"abc"))
        await asyncio.sleep(0.01)
        assert told.frames == []
        read = 0
        while read < 4 * len(big):
            read += len(await asyncio.to_thread(theirs.recv, 2**20))
        await until(lambda: told.frames)

    wired(body)


def test_who_does_not_read_in_time_is_cut_off():
    async def body(wire, told, theirs):
        wire.send_frame(bytes(2**22))
        await until(lambda: told.ends)

    wired(body, send_s=0.02)


@pytest.mark.parametrize("waits", [False, True])
def test_descriptors_are_closed_whether_they_were_sent_or_not(waits):
    async def body(wire, told, theirs):
        reading, writing = os.pipe()
        if waits:
            wire.send_frame(bytes(2**22))
        wire.send_frame(b"take this", [writing])
        if waits:
            wire.close()
        else:
            data, (received,), _, _ = socket.recv_fds(theirs, 100, 1)
            assert data == b"take this"
            os.close(received)
        # Its last writer is gone.
        assert os.read(reading, 1) == b""
        os.close(reading)

    wired(body)


def test_descriptors_for_who_has_left_are_closed():
    async def body(wire, told, theirs):
        wire.close()
        reading, writing = os.pipe()
        wire.send_frame(b"late", [writing])
        assert os.read(reading, 1) == b""
        os.close(reading)

    wired(body)
