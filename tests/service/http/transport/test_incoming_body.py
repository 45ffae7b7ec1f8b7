"""A body walks into the memory that a route has for it, or says why not."""

import asyncio
import weakref

import numpy as np
import pytest
from normserve.errors import ClientLeftError, OverloadedError, RequestTimeoutError, TooLargeError
from normserve.http.transport import IncomingBody


class Memory:
    """Gives what is asked for, up to a limit, and remembers what that was."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.asked: list[int] = []

    def __call__(self, nbytes: int) -> memoryview:
        if nbytes > self.limit:
            raise TooLargeError("too long")
        self.asked.append(nbytes)
        return memoryview(bytearray(nbytes))


def receive(
    reception: IncomingBody, memory: Memory, *events, pause_s: float = 5, total_s: float = 5, **rate: float
) -> bytes:
    """Run the route's side, and the connection's: `events` are called between steps of the loop."""

    async def both() -> bytes:
        route = asyncio.ensure_future(reception.receive_into(memory, pause_s=pause_s, total_s=total_s, **rate))
        for event in events:
            await asyncio.sleep(0)
            event()
        return bytes(await route)

    return asyncio.run(both())


def arriving(reception: IncomingBody, data: bytes):
    def write() -> None:
        room = reception.get_free_buffer()
        room[: len(data)] = data
        reception.count_received(len(data))

    return write


def test_announced_body_is_written_where_it_belongs():
    memory = Memory()
    reception = IncomingBody(6, lambda: bytearray(b"ab"))
    got = receive(
        reception, memory, arriving(reception, b"cd"), arriving(reception, b"ef"), reception.mark_complete
    )
    assert got == b"abcdef"
    assert memory.asked == [6]
    assert reception.received_bytes == 6


def test_room_ends_with_the_body_though_the_slab_does_not():
    memory = Memory()
    reception = IncomingBody(6, lambda: bytearray(b"ab"))
    rooms: list[int] = []
    larger = lambda nbytes: memory(nbytes + 100)  # noqa: E731
    receive(reception, larger, lambda: rooms.append(len(reception.get_free_buffer())), reception.mark_complete)
    assert rooms == [4]


def test_body_that_came_with_its_header_needs_no_memory():
    memory = Memory()
    reception = IncomingBody(2, lambda: bytearray(b"ab"))
    reception.mark_complete()
    assert receive(reception, memory) == b"ab"
    assert memory.asked == []


def test_chunked_body_moves_when_it_outgrows_its_memory():
    memory = Memory()
    reception = IncomingBody(None, lambda: bytearray(b"a"))
    pieces = [b"bc", b"", b"defg"]
    got = receive(
        reception,
        memory,
        *[lambda piece=piece: reception.append_part(piece) for piece in pieces],
        reception.mark_complete,
    )
    assert got == b"abcdefg"
    assert memory.asked == [1, 3, 7]


def test_chunked_body_is_refused_where_memory_ends():
    reception = IncomingBody(None, bytearray)
    with pytest.raises(TooLargeError):
        receive(reception, Memory(limit=4), lambda: reception.append_part(b"12345"))
    assert not reception.is_receiving


@pytest.mark.parametrize(("pause_s", "total_s", "said"), [(0.01, 5, "no more"), (5, 0.01, "had not come")])
def test_slow_body_is_given_up(pause_s, total_s, said):
    reception = IncomingBody(6, bytearray)
    with pytest.raises(RequestTimeoutError, match=said):
        receive(reception, Memory(), pause_s=pause_s, total_s=total_s)
    assert not reception.is_receiving


def test_body_below_the_least_rate_is_given_up():
    reception = IncomingBody(600, bytearray)
    with pytest.raises(RequestTimeoutError, match="less than 1000 bytes a second"):
        receive(reception, Memory(), arriving(reception, b"abc"), min_bytes_per_s=1000, grace_s=0.01)
    assert not reception.is_receiving
    assert reception.is_aborted


def test_body_that_is_cut_off_holds_no_memory_from_then_on():
    memories = []

    def memory(nbytes: int) -> memoryview:
        slab = np.empty(nbytes, np.uint8)
        memories.append(weakref.ref(slab))
        return slab.data

    reception = IncomingBody(6, bytearray)

    def cut_off() -> None:
        reception.abort(OverloadedError("for another"))
        assert memories[0]() is None

    with pytest.raises(OverloadedError):
        receive(reception, memory, arriving(reception, b"ab"), cut_off)
    assert len(memories) == 1


def test_body_that_is_whole_is_not_lost_to_what_comes_after():
    """Its route may not have run since."""
    reception = IncomingBody(2, bytearray)
    whole_and_left = lambda: (reception.mark_complete(), reception.abort(ClientLeftError("gone")))  # noqa: E731
    assert receive(reception, Memory(), arriving(reception, b"ab"), whole_and_left) == b"ab"


def test_silent_chunked_body_needs_no_memory():
    memory = Memory()
    reception = IncomingBody(None, bytearray)
    with pytest.raises(ClientLeftError):
        receive(reception, memory, lambda: None, lambda: reception.abort(ClientLeftError("gone")))
    assert memory.asked == []


def test_first_piece_for_which_there_is_no_memory_ends_the_body():
    reception = IncomingBody(None, lambda: bytearray(b"12345"))
    with pytest.raises(TooLargeError):
        receive(reception, Memory(limit=4))
    assert not reception.is_receiving


def test_departure_ends_the_wait():
    reception = IncomingBody(6, bytearray)
    with pytest.raises(ClientLeftError):
        receive(reception, Memory(), lambda: reception.abort(ClientLeftError("gone")))


def test_memory_is_let_go_of():
    reception = IncomingBody(6, bytearray)
    receive(reception, Memory(), arriving(reception, b"abcdef"), reception.mark_complete)
    assert len(reception.get_free_buffer()) == 0


def test_client_that_left_before_its_body_was_asked_for_is_not_waited_for():
    begun = []
    reception = IncomingBody(6, lambda: begun.append(1) or bytearray())
    reception.abort(ClientLeftError("gone"))
    with pytest.raises(ClientLeftError):
        receive(reception, Memory())
    assert begun == []
