"""Bodies that a front end receives and responses that it sends, from the side of the application."""

import asyncio

import numpy as np
import pytest
from normserve.errors import ClientLeftError, OverloadedError, RequestTimeoutError
from normserve.http.relay import relay_messages
from normserve.http.relay.relayed_request import RelayedIncomingBody, RelayedResponseSender
from normserve.memory.slabs import PLAIN

from tests.service.http.relay.fake_front_end import FakeFrontEnd

KIB = 2**10
PATIENT = {"pause_s": 20.0, "total_s": 20.0}


def asked(announced, body=None):
    return relay_messages.RequestStarted(3, b"", ("127.0.0.1", 1), announced, body, began=1.5, request_id="asked")


@pytest.fixture
def front_end():
    return FakeFrontEnd()


async def begun(reception, front_end, **limits):
    """A body that is being received, once the front end knows of it."""
    task = asyncio.get_running_loop().create_task(
        reception.receive_into(front_end.slab_pool.borrow, **{**PATIENT, **limits})
    )
    while not front_end.said:
        await asyncio.sleep(0)
    return task


def test_a_body_that_came_along_is_where_it_is(front_end):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(5, bytearray(b"whole")))
        assert reception.is_complete
        body = await reception.receive_into(front_end.slab_pool.borrow, **PATIENT)
        assert bytes(body) == b"whole"
        assert not body.readonly
        assert (reception.received_bytes, reception.receive_s, front_end.said) == (5, 0, [])

    asyncio.run(run())


def test_a_body_comes_to_its_place(front_end):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(100 * KIB))
        task = await begun(reception, front_end)
        (receive,) = front_end.said
        assert (receive.number, receive.nbytes) == (3, 100 * KIB)
        assert reception.is_memory_shared
        reception.on_progress(50 * KIB)
        assert reception.received_bytes == 50 * KIB
        front_end.write(receive, b"y" * 100 * KIB)
        reception.on_body_received(relay_messages.BodyReceived(3, 100 * KIB, ended=4.0))
        assert bytes(await task) == b"y" * 100 * KIB
        assert reception.receive_s == 2.5
        assert not reception.is_memory_shared

    asyncio.run(run())


@pytest.mark.parametrize("error", [OverloadedError("share"), RequestTimeoutError("stalled")])
def test_a_place_is_nobody_elses_until_the_front_end_lets_it_go(front_end, error):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(100 * KIB))
        task = await begun(reception, front_end)
        reception.abort(error)
        with pytest.raises(type(error)):
            await task
        del task
        assert front_end.said[-1] == relay_messages.BodyStopRequest(3)
        assert reception.is_memory_shared
        assert front_end.slab_pool.used_bytes > 0
        reception.on_body_aborted(is_client_disconnected=False)
        assert not reception.is_memory_shared
        assert front_end.slab_pool.used_bytes == 0

    asyncio.run(run())


def test_one_that_was_whole_before_it_was_stopped_lets_its_place_go_too(front_end):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(100 * KIB))
        task = await begun(reception, front_end)
        reception.abort(OverloadedError("share"))
        reception.on_body_received(relay_messages.BodyReceived(3, 100 * KIB, ended=4.0))
        with pytest.raises(OverloadedError):
            await task
        assert not reception.is_memory_shared
        assert not reception.is_complete

    asyncio.run(run())


@pytest.mark.parametrize("source", [None, PLAIN], ids=["chunked", "memory that is not shared"])
def test_a_body_comes_in_pieces(source):
    front_end = FakeFrontEnd(source)

    async def run():
        reception = RelayedIncomingBody(front_end, asked(None if source is None else 9))
        task = await begun(reception, front_end)
        assert front_end.said == [relay_messages.BodyPartRequest(3, all=True)]
        for piece, more in ((b"one", True), (b"", True), (b"two", True), (b"end", False)):
            reception.on_body_part(relay_messages.BodyPart(3, piece, more))
        assert bytes(await task) == b"onetwoend"
        assert not reception.is_memory_shared

    asyncio.run(run())


@pytest.mark.parametrize("announced", [100 * KIB, None])
def test_a_client_that_leaves_ends_its_body(front_end, announced):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(announced))
        task = await begun(reception, front_end)
        reception.on_body_aborted(is_client_disconnected=True)
        with pytest.raises(ClientLeftError):
            await task
        assert not reception.is_memory_shared
        assert (await reception.receive_message())["type"] == "http.disconnect"

    asyncio.run(run())


def test_a_body_that_is_too_slow_is_cut_off_by_what_has_come(front_end):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(100 * KIB))
        task = await begun(reception, front_end, pause_s=0.05)
        with pytest.raises(RequestTimeoutError):
            await task
        assert front_end.said[-1] == relay_messages.BodyStopRequest(3)

    asyncio.run(run())


def test_what_nobody_wants_is_pulled_piece_by_piece(front_end):
    async def run():
        reception = RelayedIncomingBody(front_end, asked(100 * KIB))
        receiving = asyncio.get_running_loop().create_task(reception.receive_message())
        await asyncio.sleep(0)
        assert front_end.said == [relay_messages.BodyPartRequest(3, all=False)]
        reception.on_body_part(relay_messages.BodyPart(3, b"some", more=True))
        assert await receiving == {"type": "http.request", "body": b"some", "more_body": True}
        assert not reception.is_complete
        late = asyncio.get_running_loop().create_task(reception.receive_message())
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        # Else the front end would wait for the client while the answer is due.
        assert front_end.said[-1] == relay_messages.BodyStopRequest(3)

    asyncio.run(run())


def test_large_results_are_told_by_where_they_lie(front_end):
    async def run():
        departure = RelayedResponseSender(front_end, 3)
        slab = front_end.slab_pool.borrow(100 * KIB)[: 100 * KIB]
        header = b"head"
        sending = asyncio.get_running_loop().create_task(
            departure.send_response(200, [(b"a", b"b")], [header, slab], 4 + 100 * KIB)
        )
        await asyncio.sleep(0)
        (told,) = front_end.said
        number = front_end.locate_and_share_slab(slab).slab.number
        assert told.body == [b"head", relay_messages.SharedSlabRange(number, 0, 100 * KIB)]
        del slab
        assert front_end.slab_pool.used_bytes > 0
        departure.on_response_sent(relay_messages.ResponseSent(3, 0.25, is_delivered=True))
        await sending
        del sending
        assert (departure.send_s, departure.is_delivered, departure.is_response_complete) == (0.25, True, True)
        assert front_end.slab_pool.used_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [100 * KIB, 1000 * KIB])
def test_results_elsewhere_are_copied_to_where_they_can_be_reached(front_end, nbytes):
    async def run():
        departure = RelayedResponseSender(front_end, 3)
        y = np.arange(nbytes, dtype=np.uint8)
        sending = asyncio.get_running_loop().create_task(departure.send_response(200, [], [memoryview(y)], nbytes))
        while not front_end.said:
            await asyncio.sleep(0.001)
        (part,) = front_end.said[0].body
        (memory,) = [
            each for each in front_end.shared._slabs_by_address.values() if each.number == part.slab_number
        ]
        there = (np.ctypeslib.ctypes.c_ubyte * nbytes).from_address(memory.address + part.offset)
        assert (np.frombuffer(there, np.uint8) == y).all()
        departure.on_response_sent(relay_messages.ResponseSent(3, 0.25, is_delivered=True))
        await sending

    asyncio.run(run())


def test_a_client_that_has_left_is_sent_nothing(front_end):
    async def run():
        departure = RelayedResponseSender(front_end, 3)
        left = []
        departure.on_disconnect = lambda: left.append(True)
        departure.handle_disconnect()
        departure.handle_disconnect()
        await departure.send_response(200, [], [b"x"], 1)
        await departure.send_message({"type": "http.response.start", "status": 200, "headers": []})
        await departure.send_message({"type": "http.response.body", "body": b"x"})
        assert (front_end.said, left, departure.is_delivered) == ([], [True], False)

    asyncio.run(run())


def test_a_front_end_that_is_gone_ends_what_waits_for_it(front_end):
    async def run():
        departure = RelayedResponseSender(front_end, 3)
        sending = asyncio.get_running_loop().create_task(departure.send_response(200, [], [b"x"], 1))
        await asyncio.sleep(0)
        departure.on_front_end_lost()
        await sending
        assert departure.is_delivered is False

    asyncio.run(run())


def test_messages_of_a_response_go_along_one_by_one(front_end):
    async def run():
        departure = RelayedResponseSender(front_end, 3)
        start = {"type": "http.response.start", "status": 404, "headers": [(b"a", b"b")]}
        await departure.send_message(start)
        for body, more in ((b"one", True), (b"two", False)):
            sending = asyncio.get_running_loop().create_task(
                departure.send_message({"type": "http.response.body", "body": body, "more_body": more})
            )
            await asyncio.sleep(0)
            assert departure.is_response_complete is not more
            departure.on_response_sent(relay_messages.ResponseSent(3, 0.5, is_delivered=not more))
            await sending
        assert front_end.said == [
            relay_messages.ResponsePart(3, 404, [(b"a", b"b")], b"one", more=True),
            relay_messages.ResponsePart(3, 0, [], b"two", more=False),
        ]
        assert departure.is_delivered

    asyncio.run(run())
