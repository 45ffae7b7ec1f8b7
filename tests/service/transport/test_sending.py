"""What a response costs in writes, and what is known of its end."""

import asyncio

import pytest
from normserve.transport.sending import Sending


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


@pytest.fixture
def sending(wire, loop) -> Sending:
    return Sending(wire, loop)


def test_header_and_large_body_leave_together_as_they_are(wire, sending):
    body = memoryview(bytearray(2**20))
    sending.write(b"header")
    sending.write(b"start of body")
    assert wire.writes == []
    sending.write(body)
    sending.finish()
    assert len(wire.writes) == 1
    assert wire.writes[0][:2] == [b"header", b"start of body"]
    assert wire.writes[0][2] is body


def test_small_response_is_one_write(wire, sending):
    sending.write(b"header")
    sending.write(b"body")
    sending.finish()
    assert wire.writes == [b"headerbody"]


def test_nothing_is_held_beyond_the_step_of_the_loop(wire, sending, loop):
    sending.write(b"header")
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert wire.writes == [b"header"]


def test_response_is_delivered_while_the_client_is_there(wire, sending):
    sending.write(b"all")
    sending.finish()
    assert sending.is_delivered
    sending.depart()
    assert sending.is_delivered


def test_last_response_of_a_connection_is_delivered_though_the_server_closes(wire, sending):
    sending.write(b"all")
    sending.close()
    sending.finish()
    assert wire.writes == [b"all"]
    assert sending.is_delivered


def test_response_that_ends_while_the_connection_closes_is_not_delivered(wire, sending):
    sending.write(b"all")
    wire.closing = True
    sending.finish()
    assert sending.is_delivered is False


def test_departure_is_told_once_and_before_the_end_only(sending):
    told: list[None] = []
    sending.on_departure = lambda: told.append(None)
    sending.depart()
    sending.depart()
    assert len(told) == 1
    assert sending.is_delivered is False
