"""What both clients that share memory make of what a server says, in whichever order, and of its end."""

import asyncio
import gc
import os
import socket
import struct
import threading
import weakref
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from normserve.client import (
    ApiError,
    AsyncClient,
    Client,
    ConnectionFailedError,
    OverloadedError,
    RequestTimeoutError,
    RetryPolicy,
    UnauthorizedError,
    UnexpectedAnswerError,
)
from normserve.client.local.async_connection import AsyncLocalClientConnection
from normserve.client.local.client_protocol import LocalRequest
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.memory.host_segments import HostSegment, make_segment

ONCE = RetryPolicy(tries=1)


@contextmanager
def serving(path, server):
    """Have a server serve any number of connections; its `answer` says whether one is to end."""
    threads, accepted = [], []

    def converse(connected):
        found = FrameReader(2**30)
        with connected, suppress(OSError):
            while data := connected.recv(2**16):
                for tag, content in found.feed(data):
                    for message in frames.decode_messages(content):
                        if isinstance(message, frames.HelloMessage):
                            server.greet(connected, tag)
                        elif server.answer(connected, tag, message):
                            return

    def accept(listener):
        with suppress(OSError):
            while True:
                connected, _ = listener.accept()
                accepted.append(connected)
                threads.append(threading.Thread(target=converse, args=(connected,)))
                threads[-1].start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        threads.append(threading.Thread(target=accept, args=(listener,)))
        threads[0].start()
        try:
            yield
        finally:
            for each in (listener, *accepted):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(20)


class Threaded:
    """A blocking client as an asynchronous one: each call has a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name):
        async def call(*arguments, **named):
            return await asyncio.to_thread(getattr(self._client, name), *arguments, **named)

        return call


@pytest.fixture(params=["blocking", "asynchronous"])
def play(request, tmp_path):
    """Runs `body(client, server)` with a client of a server that a test speaks for."""

    @asynccontextmanager
    async def connected(url, **options):
        options = {"retries": ONCE, "timeout_s": 20.0} | options
        if request.param == "asynchronous":
            async with AsyncClient(url, **options) as client:
                yield client
        else:
            with Client(url, **options) as client:
                yield Threaded(client)

    def run(body, server=None, **options):
        server = server or Server()
        path = str(tmp_path / "socket")

        async def main():
            async with connected(f"unix://{path}", **options) as client:
                await body(client, server)

        with serving(path, server):
            asyncio.run(asyncio.wait_for(main(), 30))
        return server

    return run


class Server:
    """Lends what is asked for and computes nothing.

    Attributes:
        asked: all messages but hellos.
        refuses: says of a request for so many bytes whether it is refused.
    """

    def __init__(self) -> None:
        self.asked = []
        self.refuses = lambda nbytes: False
        self._segments = 0

    def greet(self, connected, tag):
        connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, document={})))

    def answer(self, connected, tag, message):
        self.asked.append(message)
        if isinstance(message, frames.GrowArenaMessage):
            if self.refuses(message.nbytes):
                problem = {"code": "overloaded", "detail": "no memory", "status": 429}
                connected.sendall(frames.encode_frame(tag, frames.LocalResponse(429, "id", problem=problem)))
            else:
                self.lend(connected, tag, message.nbytes)
            return None
        if isinstance(message, frames.FreeSegmentMessage | frames.CancelRequestMessage):
            return None
        return self.respond(connected, tag, message)

    def lend(self, connected, tag, nbytes):
        descriptor, _ = make_segment(nbytes, HostSegment)
        rights = struct.pack("i", descriptor)
        frame = frames.encode_frame(tag, frames.LocalResponse(200, segment=self._segments))
        connected.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(descriptor)
        self._segments += 1

    def respond(self, connected, tag, message):
        if isinstance(message, frames.ComputeMessage):
            place = message.results["y"]
            shape = message.tensors["x"].shape
            results = {"y": frames.TensorReference(place.segment, place.offset, "float32", shape)}
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, "id", results)))
        else:
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(200, "id", document={"tag": tag})))

    def of(self, kind):
        """What was asked of one kind."""
        return [each for each in self.asked if isinstance(each, kind)]


class Reversing(Server):
    """Answers so many requests at once, the last one first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self._kept = count, []

    def respond(self, connected, tag, message):
        self._kept.append((tag, message))
        if len(self._kept) == self._count:
            for other, kept in reversed(self._kept):
                connected.sendall(
                    frames.encode_frame(other, frames.LocalResponse(200, "id", document={"name": kept.name}))
                )
            self._kept.clear()


def test_answers_in_any_order_are_for_whom_they_were_asked(play):
    async def body(client, server):
        names = [f"layer{number}" for number in range(6)]
        answers = await asyncio.gather(*[client.layer(name) for name in names])
        assert [each["name"] for each in answers] == names

    server = play(body, Reversing(6))
    assert len(server.asked) == 6


def test_memory_is_asked_for_in_less_where_there_is_no_more(play):
    server = Server()
    server.refuses = lambda nbytes: nbytes > 2**20

    async def body(client, server):
        x = await client.empty((256, 1024))
        x[:] = 3
        assert x.sum() == 3 * 2**18
        assert [each.nbytes > 2**20 for each in server.of(frames.GrowArenaMessage)] == [True, False]

    play(body, server)


def test_where_there_is_no_memory_idle_segments_are_given_back_first(play):
    server = Server()

    async def body(client, server):
        x = await client.empty((1024, 1024))
        view = weakref.ref(x)
        del x
        # A thread that made the call may have it for a moment longer.
        while view() is not None:
            await asyncio.sleep(0.001)
        server.refuses = lambda nbytes: not server.of(frames.FreeSegmentMessage)
        big = await client.empty((8, 1024, 1024))
        assert big.nbytes == 2**25
        assert [each.segment for each in server.of(frames.FreeSegmentMessage)] == [0]

    play(body, server)


def test_where_there_is_none_the_servers_refusal_is_the_callers(play):
    server = Server()
    server.refuses = lambda nbytes: True

    async def body(client, server):
        with pytest.raises(OverloadedError, match="no memory"):
            await client.empty((4, 4))
        # As much as is worth a try, and as much as is needed: there is nothing to give back.
        assert len(server.asked) == 2

    play(body, server)


def test_who_is_refused_at_the_beginning_is_told_why(play):
    class Refusing(Server):
        def greet(self, connected, tag):
            problem = {"code": "unauthorized", "detail": "no such key", "status": 401}
            connected.sendall(frames.encode_frame(tag, frames.LocalResponse(401, "id", problem=problem)))

    async def body(client, server):
        for _ in range(2):
            with pytest.raises(UnauthorizedError, match="no such key"):
                await client.info()
        assert not server.asked

    play(body, Refusing())


@pytest.mark.parametrize("status", [400, 413])
def test_a_fault_of_the_connection_is_the_error_of_all_who_wait(play, status):
    class Faulty(Server):
        def respond(self, connected, tag, message):
            self.waiting = getattr(self, "waiting", 0) + 1
            if self.waiting == 3:
                problem = {"code": "malformed_payload", "detail": "no frame", "status": status}
                connected.sendall(frames.encode_frame(0, frames.LocalResponse(status, "id", problem=problem)))

    async def body(client, server):
        outcomes = await asyncio.gather(*[client.info() for _ in range(3)], return_exceptions=True)
        assert all(isinstance(each, ApiError) and "no frame" in str(each) for each in outcomes)
        assert [each.status for each in outcomes] == [status] * 3

    play(body, Faulty())


def test_a_call_that_is_late_is_taken_back_and_its_answer_is_nobody_elses(play):
    class Slow(Server):
        late = None

        def respond(self, connected, tag, message):
            if self.late is None:
                self.late = tag
                return
            # First the answer that nobody waits for.
            connected.sendall(
                frames.encode_frame(self.late, frames.LocalResponse(200, "id", document={"tag": "late"}))
            )
            super().respond(connected, tag, message)

    async def body(client, server):
        with pytest.raises(RequestTimeoutError):
            await client.info()
        document = await client.info()
        assert document["tag"] not in ("late", server.late)
        assert [each.request for each in server.of(frames.CancelRequestMessage)] == [server.late]

    play(body, Slow(), timeout_s=0.5)


@pytest.mark.parametrize(
    "says", [b"", b"\0\0\0\x04\0\0\0\x01null", b"\xff" * 8, b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_an_end_or_nonsense_is_the_error_of_all_who_wait_and_the_next_call_connects_anew(play, says):
    class Ending(Server):
        calls = 0

        def respond(self, connected, tag, message):
            self.calls += 1
            if self.calls == 2:
                connected.sendall(says)
                return True
            if self.calls > 2:
                super().respond(connected, tag, message)
            return False

    async def body(client, server):
        outcomes = await asyncio.gather(*[client.info() for _ in range(2)], return_exceptions=True)
        assert {type(each) for each in outcomes} <= {ConnectionFailedError, UnexpectedAnswerError}
        assert len(outcomes) == 2
        assert "tag" in await client.info()

    play(body, Ending())


def test_what_a_client_had_is_given_back_when_it_closes_and_its_results_are_gone(play):
    kept = []

    async def body(client, server):
        x = await client.empty((4, 256))
        x[:] = 1
        kept.append((await client.layer_norm(x)).y)

    server = play(body)
    assert not server.of(frames.FreeSegmentMessage)
    # Views outlive the client, and what they show stays as it is.
    assert kept[0].shape == (4, 256)
    kept.clear()
    gc.collect()


def test_closing_gives_back_each_segment(play):
    over = threading.Event()

    class Counting(Server):
        def answer(self, connected, tag, message):
            ends = super().answer(connected, tag, message)
            if len(self.of(frames.FreeSegmentMessage)) == 2:
                over.set()
            return ends

    async def body(client, server):
        one, other = await client.empty((2**20,)), await client.empty((2**22,))
        assert one.nbytes + other.nbytes == 5 * 2**22

    server = play(body, Counting())
    gc.collect()
    assert over.wait(10)
    assert sorted(each.segment for each in server.of(frames.FreeSegmentMessage)) == [0, 1]


def test_no_descriptor_is_left_of_a_server_that_is_not_there(tmp_path):
    async def ask_async():
        async with AsyncClient(f"unix://{tmp_path}/none", retries=ONCE) as client:
            await client.info()

    def ask():
        with Client(f"unix://{tmp_path}/none", retries=ONCE) as client:
            client.info()

    for call in (ask, lambda: asyncio.run(ask_async())):
        with pytest.raises(ConnectionFailedError):
            call()
        gc.collect()
        before = sorted(Path("/proc/self/fd").iterdir())
        for _ in range(3):
            with pytest.raises(ConnectionFailedError):
                call()
        gc.collect()
        assert len(sorted(Path("/proc/self/fd").iterdir())) == len(before)


def test_descriptors_of_segments_are_closed_once_they_are_mapped(play):
    async def body(client, server):
        await client.info()
        before = len(list(Path("/proc/self/fd").iterdir()))
        kept = [await client.empty((2**20,)) for _ in range(4)]
        # Each mapping has one.  The server, which is a thread of this process, closes its own soon.
        while len(list(Path("/proc/self/fd").iterdir())) > before + len(kept):
            await asyncio.sleep(0.001)
        assert all(np.all(each == 0) for each in kept)

    play(body)


def test_another_event_loop_has_a_connection_of_its_own(tmp_path):
    path, server = str(tmp_path / "socket"), Server()
    with serving(path, server):
        client = AsyncClient(f"unix://{path}", retries=ONCE, timeout_s=20.0)

        async def ask():
            return [(await client.info())["tag"] for _ in range(2)]

        # Tags are counted from each connection's hello on.
        assert asyncio.run(ask()) == asyncio.run(ask())
        asyncio.run(client.close())


def test_what_waits_for_a_server_that_does_not_read_is_sent_once_it_does(tmp_path):
    path, reads = str(tmp_path / "socket"), threading.Event()
    tensors = {str(number): frames.TensorReference(0, 0, "x" * 200, (1,)) for number in range(200)}
    x = {"x": frames.TensorReference(0, 0, "float32", (1,))}
    long = frames.ComputeMessage("layer_norm", tensors | x, {"y": frames.SegmentRange(0, 0, 4)})

    class Pausing(Server):
        def answer(self, connected, tag, message):
            reads.wait(20)
            return super().answer(connected, tag, message)

    server = Pausing()

    async def main():
        link = AsyncLocalClientConnection(None)
        await link.connect(path)
        asked = [asyncio.create_task(link.send_and_wait(LocalRequest(long))) for _ in range(40)]
        await asyncio.sleep(0.01)
        reads.set()
        answers = await asyncio.gather(*asked)
        assert [each.status for each in answers] == [200] * 40
        link.close_when_unused()

    with serving(path, server):
        asyncio.run(asyncio.wait_for(main(), 30))
    assert len(server.asked) == 40
