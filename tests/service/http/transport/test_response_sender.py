"""What a response costs in writes, and what is known of its end."""

import asyncio

import pytest
from normserve.http.transport.response_sender import SocketResponseSender


class Wire:
    """A transport that remembers what it was given."""

    def __init__(self) -> None:
        self.writes: list[object] = []
        self.closing = False

    def write(self, data) -> None:
        self.writes.append(bytes(data))

    def writelines(self, buffers) -> None:
        self.writes.append(list(buffers))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Flow:
    """Whether the kernel has everything, as uvicorn's flow control tells."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.taken.set()

    @property
    def write_paused(self) -> bool:
        return not self.taken.is_set()

    async def drain(self) -> None:
        await self.taken.wait()


class Cycle:
    """As much of uvicorn's cycle as a response touches."""

    default_headers = ((b"date", b"today"),)

    def __init__(self) -> None:
        self.flow, self.message_event = Flow(), asyncio.Event()
        self.keep_alive = True
        self.disconnected = self.response_started = self.response_complete = False
        self.waiting_for_100_continue = True
        self.ends = 0

    def on_response(self) -> None:
        self.ends += 1


@pytest.fixture
def cycle() -> Cycle:
    return Cycle()


@pytest.fixture
def sending(wire, loop, cycle) -> SocketResponseSender:
    return SocketResponseSender(wire, loop, cycle)


def test_header_and_large_body_leave_together_as_they_are(wire, sending):
    body = memoryview(bytearray(2**20))
    sending.write(b"header")
    sending.write(b"start of body")
    assert wire.writes == []
    sending.write(body)
    sending.finish_response()
    assert len(wire.writes) == 1
    assert wire.writes[0][:2] == [b"header", b"start of body"]
    assert wire.writes[0][2] is body


def test_small_response_is_one_write(wire, sending):
    sending.write(b"header")
    sending.write(b"body")
    sending.finish_response()
    assert wire.writes == [b"headerbody"]


def test_nothing_is_held_beyond_the_step_of_the_loop(wire, sending, loop):
    sending.write(b"header")
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert wire.writes == [b"header"]


def test_response_is_delivered_while_the_client_is_there(wire, sending):
    sending.write(b"all")
    sending.finish_response()
    assert sending.is_delivered
    sending.handle_disconnect()
    assert sending.is_delivered


def test_last_response_of_a_connection_is_delivered_though_the_server_closes(wire, sending):
    sending.write(b"all")
    sending.close()
    sending.finish_response()
    assert wire.writes == [b"all"]
    assert sending.is_delivered


def test_response_that_ends_while_the_connection_closes_is_not_delivered(wire, sending):
    sending.write(b"all")
    wire.closing = True
    sending.finish_response()
    assert sending.is_delivered is False


def test_departure_is_told_once_and_before_the_end_only(sending):
    told: list[None] = []
    sending.on_disconnect = lambda: told.append(None)
    sending.handle_disconnect()
    sending.handle_disconnect()
    assert len(told) == 1
    assert sending.is_delivered is False


class TestProbe:
    """The first bytes of a response may go ahead of it, once and without a trace."""

    def test_of_a_whole_response(self, wire, sending, loop):
        sending.send_disconnect_probe()
        assert wire.writes == [b"HTTP/1.1 "]
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"body"], 4))
        assert b"".join(wire.writes) == HEAD + b"\r\nbody"

    def test_of_a_response_in_messages(self, wire, sending):
        sending.send_disconnect_probe()
        sending.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        sending.write(b"HTTP/1.1 is text here")
        sending.finish_response()
        assert b"".join(wire.writes) == b"HTTP/1.1 404 Not Found\r\n\r\nHTTP/1.1 is text here"

    def test_none_behind_the_start(self, wire, sending):
        sending.write(b"HTTP/1.1 200 OK\r\n")
        sending.send_disconnect_probe()
        sending.finish_response()
        assert wire.writes == [b"HTTP/1.1 200 OK\r\n"]


HEADERS = [(b"content-type", b"application/x-npy"), (b"content-length", b"4")]
HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: application/x-npy\r\ncontent-length: 4\r\n"


class TestWholeResponses:
    def test_small_one_is_one_write(self, wire, sending, cycle, loop):
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"bo", memoryview(b"dy")], 4))
        assert wire.writes == [HEAD + b"\r\nbody"]
        assert (cycle.response_started, cycle.response_complete, cycle.ends) == (True, True, 1)
        assert cycle.message_event.is_set()
        assert not cycle.waiting_for_100_continue
        assert not wire.closing

    def test_large_one_is_one_write_of_the_buffers_as_they_are(self, wire, sending, loop):
        body = memoryview(bytearray(2**20))
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"head", body], 2**20 + 4))
        assert wire.writes[0][:2] == [HEAD + b"\r\n", b"head"]
        assert wire.writes[0][2] is body

    def test_very_large_one_lets_others_have_a_turn(self, wire, sending, loop):
        body = memoryview(bytearray(range(256)) * (5 * 2**12))
        turns = []

        async def respond():
            responding = asyncio.create_task(sending.send_response(200, HEADERS, [b"head", body], len(body) + 4))
            while not responding.done():
                await asyncio.sleep(0)
                turns.append(len(wire.writes))

        loop.run_until_complete(respond())
        assert b"".join(piece for write in wire.writes for piece in write) == HEAD + b"\r\nhead" + body
        assert 1 in turns
        assert 2 in turns
        assert max(sum(map(len, write)) for write in wire.writes) <= 2 * 2**20

    def test_what_tls_encrypts_at_once_is_less(self, wire, cycle, loop):
        sending = SocketResponseSender(wire, loop, cycle, is_encrypted=True)
        loop.run_until_complete(sending.send_response(200, HEADERS, [memoryview(bytearray(2**20))], 2**20))
        assert max(sum(map(len, write)) for write in wire.writes) == 2**18

    def test_only_what_is_large_is_counted(self, wire, sending, cycle, loop):
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"body"], 4))
        assert not {"pace", "unfinished"} & vars(sending).keys()
        large = SocketResponseSender(wire, loop, cycle)
        loop.run_until_complete(large.send_response(200, HEADERS, [bytes(5 * 2**20)], 5 * 2**20))
        assert large.pending_bytes == len(HEAD) + 2 + 5 * 2**20

    def test_large_one_is_complete_when_the_kernel_has_it(self, wire, sending, cycle, loop):
        async def respond():
            wire.writelines = lambda buffers: cycle.flow.taken.clear()
            responding = asyncio.create_task(sending.send_response(200, HEADERS, [bytes(2**20)], 2**20))
            await asyncio.sleep(0)
            assert cycle.response_started
            assert not cycle.response_complete
            cycle.flow.taken.set()
            await responding
            assert cycle.response_complete

        loop.run_until_complete(respond())

    def test_last_of_a_connection_says_so_and_closes(self, wire, sending, cycle, loop):
        cycle.keep_alive = False
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"body"], 4))
        sending.finish_response()
        assert wire.writes == [HEAD + b"connection: close\r\n\r\nbody"]
        assert wire.closing
        assert sending.is_delivered

    def test_nothing_is_sent_to_a_client_that_has_left(self, wire, sending, cycle, loop):
        cycle.disconnected = True
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"body"], 4))
        sending.handle_disconnect()
        loop.run_until_complete(sending.send_response(200, HEADERS, [b"body"], 4))
        assert (wire.writes, cycle.ends) == ([], 0)
