"""Bodies and responses over plain ASGI, as a server that somebody else chose brings them."""

import asyncio
from functools import partial

import pytest
from normserve.errors import ClientLeftError, OverloadedError, RequestTimeoutError
from normserve.http.transport import AsgiAdapter

BODY = bytes(range(256)) * 40


def piece(data: bytes, more_body: bool) -> dict:
    return {"type": "http.request", "body": data, "more_body": more_body}


def pieces(nbytes: int) -> list[dict]:
    """The body in messages of so many bytes."""
    return [piece(BODY[at : at + nbytes], at + nbytes < len(BODY)) for at in range(0, len(BODY), nbytes)]


async def call(app, messages, headers=(), patience_s=5.0):
    """What an application sends that receives these messages, and nothing after them."""
    incoming, sent = asyncio.Queue(), []
    for message in messages:
        incoming.put_nowait(message)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": list(headers), "client": None}
    async with asyncio.timeout(patience_s):
        await AsgiAdapter(app)(scope, incoming.get, send)
    return sent


async def receive_into(taken, make_room, scope, receive, send):
    """A route that wants its body in memory of its own."""
    reception = scope["state"]["reception"]
    taken.append(bytes(await reception.receive_into(make_room, pause_s=0.05, total_s=2.0)))
    assert reception.is_complete


def room(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


LENGTH = (b"content-length", b"%d" % len(BODY))
CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize("header", [LENGTH, CHUNKED])
@pytest.mark.parametrize("nbytes", [100, 4096, len(BODY)])
def test_a_body_comes_in_pieces_and_lies_in_one(header, nbytes):
    taken = []
    asyncio.run(call(partial(receive_into, taken, room), pieces(nbytes), [header]))
    assert taken == [BODY]


def test_an_announced_body_has_one_memory():
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        return room(nbytes)

    asyncio.run(call(partial(receive_into, [], make_room), pieces(1000), [LENGTH]))
    assert asked == [len(BODY)]


def test_without_a_body_there_is_nothing_to_wait_for():
    taken = []
    asyncio.run(call(partial(receive_into, taken, room), []))
    assert taken == [b""]


def test_a_client_that_leaves_ends_its_body():
    messages = [*pieces(1000)[:3], {"type": "http.disconnect"}]
    with pytest.raises(ClientLeftError):
        asyncio.run(call(partial(receive_into, [], room), messages, [LENGTH]))


def test_a_client_that_stalls_is_given_up():
    with pytest.raises(RequestTimeoutError):
        asyncio.run(call(partial(receive_into, [], room), pieces(1000)[:3], [LENGTH]))


def test_a_chunked_body_ends_where_there_is_no_room_for_it():
    def little_room(nbytes):
        if nbytes > 5000:
            raise OverloadedError("no more")
        return room(nbytes)

    with pytest.raises(OverloadedError):
        asyncio.run(call(partial(receive_into, [], little_room), pieces(1000), [CHUNKED]))


def test_what_no_route_took_can_still_be_read():
    async def stall_and_drain(scope, receive, send):
        with pytest.raises(RequestTimeoutError):
            await scope["state"]["reception"].receive_into(room, pause_s=0.01, total_s=1.0)
        incoming.put_nowait(piece(b"rest", False))
        assert (await receive())["body"] == b"rest"
        assert scope["state"]["reception"].is_complete

    incoming = asyncio.Queue()
    scope = {"type": "http", "headers": [LENGTH], "client": None}

    async def send(message):
        raise AssertionError(message)

    asyncio.run(AsgiAdapter(stall_and_drain)(scope, incoming.get, send))


def test_views_leave_as_bytes_and_the_last_one_counts_as_delivered():
    async def answer(scope, receive, send):
        sending = scope["state"]["sending"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": memoryview(b"ab"), "more_body": True})
        assert sending.is_delivered is None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert sending.is_delivered is True
        assert sending.send_s > 0

    sent = asyncio.run(call(answer, []))
    assert sent[1]["body"] == b"ab"
    assert isinstance(sent[1]["body"], bytes)


def test_what_is_no_request_passes_as_it_is():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    scope = {"type": "lifespan"}
    asyncio.run(AsgiAdapter(app)(scope, None, None))
    assert seen == [scope]
