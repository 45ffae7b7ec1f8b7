"""Requests that recur: who answers them, what they are counted as, and what ends it."""

import asyncio
import gc
import socket

import msgspec
import pytest
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.codec import local_messages as frames
from normserve.engine.engine import EngineState

from tests.service.jobs.fake_jobs import layer
from tests.service.local.replayed import GRAPH, framed, played

SECRET = "a secret that is long enough"


def test_a_request_that_comes_again_is_replayed():
    async def body(client):
        first = await client.ask(client.compute(), 5)
        again = await client.ask(client.compute(), 6)
        assert (client.by_python, client.driver.launched) == (1, [GRAPH])
        assert again.status == first.status == 200
        assert again.results == first.results
        assert again.request_id != first.request_id
        assert again.stages_ms.keys() == first.stages_ms.keys()
        # Another request is another launch, and the first is known as before.
        await client.ask(client.compute(offset=64), 7)
        await client.ask(client.compute(), 8)
        assert (client.by_python, client.driver.launched) == (2, [GRAPH, GRAPH])

    played(body)


def test_what_is_not_captured_is_not_replayed():
    async def body(client):
        client.is_captured = False
        for _ in range(3):
            await client.ask(client.compute())
        assert client.by_python == 3

    played(body)


def test_a_frame_that_is_long_is_not_replayed():
    """The replayer limits the number of frames that it has learned, not their bytes."""

    async def body(client):
        content = msgspec.json.encode(client.compute())
        for nbytes, by_python in ((2048, 1), (2049, 4)):
            padded = content[:-1] + b" " * (nbytes - len(content)) + content[-1:]
            for tag in range(3):
                await client.send(frames.PREFIX.pack(len(padded), tag) + padded)
                assert (await client.answer())[1].status == 200
            assert client.by_python == by_python

    played(body)


def test_replayed_requests_are_counted_like_others():
    async def body(client):
        for _ in range(10):
            await client.ask(client.compute())
        assert client.by_python == 1
        assert client.counted("requests_total") == 10 + 2
        assert client.counted("request_duration_seconds_count") == 10 + 2
        assert client.counted("batch_requests_count") == 10
        assert client.counted("request_bandwidth_bytes_per_second_count") == 10
        assert client.counted("kernel_bytes_total") == 10 * 2
        assert client.counted("kernel_seconds_total") == pytest.approx(9 * 0.25e-3 + 0.5)
        assert client.counted("inflight_requests") == 0
        assert client.counted("requests_total") == 10 + 2

    played(body)


def test_many_replayed_requests_are_counted_without_a_scrape():
    async def body(client):
        await client.ask(client.compute())
        for _ in range(1024 // 32):
            await client.send(b"".join(framed(client.compute(), tag) for tag in range(1, 33)))
            for _ in range(32):
                await client.answer()
        assert client.by_python == 1
        assert not client.replaying._replayer.count_all()[2]
        assert client.counted("batch_requests_count") == 1 + 1024

    played(body)


def test_a_launch_that_lasts_is_admitted_until_it_ends():
    async def body(client):
        await client.ask(client.compute())
        client.driver.ends_at_once = False
        await client.send(client.compute(), 9)
        while not client.driver.launched:
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)
        assert client.behind.limits.request_count == 1
        assert client.behind.limits.used_bytes == 32
        assert client.behind.progress.stalled_s > 0
        assert client.connection.is_busy
        client.driver.end()
        assert (await client.answer())[0] == 9

    played(body)


def test_requests_in_flight_when_the_client_goes_are_counted_as_left():
    async def body(client):
        await client.ask(client.compute())
        client.driver.ends_at_once = False
        await client.send(client.compute())
        while not client.driver.launched:
            await asyncio.sleep(0)
        client.theirs.close()
        while not client.ended:
            await asyncio.sleep(0)
        client.driver.end()
        while client.behind.limits.request_count or not client.counted("cancelled_total"):
            await asyncio.sleep(0)
        assert client.counted("cancelled_total") == 1

    played(body)


def test_a_full_server_refuses_what_it_has_replayed():
    async def body(client):
        await client.ask(client.compute())
        permit = client.behind.limits.acquire(0, "another")
        assert (await client.ask(client.compute())).status == 429
        permit.release()
        assert (await client.ask(client.compute())).status == 200
        assert client.driver.launched == []

    played(body, most_requests=1)


def test_a_draining_server_refuses_what_it_has_replayed():
    async def body(client):
        await client.ask(client.compute())
        client.behind.engine.start_draining()
        assert (await client.ask(client.compute())).status == 503
        assert client.driver.launched == []

    played(body)


def test_a_failed_launch_is_answered_and_ends_the_connection_and_the_engine():
    async def body(client):
        await client.ask(client.compute())
        client.driver.codes["event_query"] = 700
        answer = await client.ask(client.compute(), 3)
        assert answer.status == 500
        with pytest.raises(EOFError):
            await client.answer()
        assert client.behind.engine.state is EngineState.FAILED

    played(body)


def test_memory_that_is_given_back_is_not_used_again():
    async def body(client):
        await client.ask(client.compute())
        await client.send(frames.FreeSegmentMessage(0))
        assert (await client.ask(client.compute())).status == 422
        assert client.driver.launched == []

    played(body)


def test_a_change_of_layers_has_requests_checked_again():
    async def body(client):
        client.behind.layer_messages.put_or_replace(layer(size=4))
        await client.ask(client.compute(query="layer=a"))
        await client.ask(client.compute(query="layer=a"))
        assert client.driver.launched == [GRAPH]
        client.behind.layer_messages.remove("a")
        assert (await client.ask(client.compute(query="layer=a"))).status == 404
        assert client.driver.launched == [GRAPH]

    played(body)


async def while_it_is_computed(client, message, change):
    """Send a message, and make a change before it is computed."""
    client.behind.executor.launches_quickly = False
    await client.send(message, 9)
    while not client.behind.executor.running:
        await asyncio.sleep(0)
    await change()
    assert (await client.answer())[1].status == 200
    client.behind.executor.launches_quickly = True


@pytest.mark.parametrize("is_removed", [False, True])
def test_what_was_computed_with_a_layer_that_is_no_more_is_not_replayed(is_removed):
    async def body(client):
        client.behind.layer_messages.put_or_replace(layer(size=4))

        async def change():
            if is_removed:
                client.behind.layer_messages.remove("a")
            else:
                client.behind.layer_messages.put_or_replace(layer(size=4))

        await while_it_is_computed(client, client.compute(query="layer=a"), change)
        assert (await client.ask(client.compute(query="layer=a"))).status == (404 if is_removed else 200)
        assert client.driver.launched == []

    played(body)


def test_what_lies_in_memory_that_is_no_more_is_not_replayed():
    async def body(client):
        async def change():
            await client.send(frames.FreeSegmentMessage(0))
            while client.connection._segment_table.segments:
                await asyncio.sleep(0)

        await while_it_is_computed(client, client.compute(), change)
        assert (await client.ask(client.compute())).status == 422
        assert client.driver.launched == []

    played(body)


def test_a_change_of_keys_has_clients_checked_again():
    keys = Keyring.from_secret(SECRET)

    async def body(client):
        await client.ask(client.compute())
        await client.ask(client.compute())
        assert client.counted("key_requests_total") == 2 + 1
        assert client.driver.launched == [GRAPH]
        keys.replace_keys([])
        assert (await client.ask(client.compute())).status == 401
        assert client.driver.launched == [GRAPH]

    played(body, key=SECRET, keys=keys)


@pytest.mark.parametrize(
    "limit",
    [{"requests_per_second": 1e6}, {"max_inflight_bytes": 2**30}, {"expires": 4e9}],
    ids=lambda limit: next(iter(limit)),
)
def test_requests_of_keys_with_limits_are_not_replayed(limit):
    [digest] = Keyring.from_secret(SECRET)._by_digest
    keys = Keyring([ApiKey("a", digest, frozenset(KeyScope), **limit)])

    async def body(client):
        for _ in range(3):
            assert (await client.ask(client.compute())).status == 200
        assert client.by_python == 3

    played(body, key=SECRET, keys=keys)


def test_requests_that_must_begin_at_once_are_not_replayed():
    async def body(client):
        for _ in range(3):
            await client.ask(client.compute(query="timeout_ms=19"))
        assert client.by_python == 3
        for _ in range(3):
            await client.ask(client.compute(query="timeout_ms=21"))
        assert client.by_python == 4

    played(body)


def test_frames_in_any_parts_are_answered_in_their_turn():
    async def body(client):
        await client.ask(client.compute())
        data = framed(client.compute(), 1) + framed(client.compute(offset=64), 2) + framed(client.compute(), 3)
        for index in range(len(data)):
            await client.send(data[index : index + 1])
            await asyncio.sleep(0)
        assert {(await client.answer())[0] for _ in range(3)} == {1, 2, 3}
        await client.send(data)
        assert {(await client.answer())[0] for _ in range(3)} == {1, 2, 3}
        assert client.by_python == 4
        assert client.driver.launched == [GRAPH] * 3

    played(body)


def test_messages_of_one_frame_are_not_replayed():
    async def body(client):
        for _ in range(2):
            await client.send([client.compute(), client.compute(offset=64)], 1)
            assert {(await client.answer())[0] for _ in range(2)} == {1, 2}
        assert client.by_python == 4

    played(body)


def test_a_client_that_does_not_read_gets_all_answers_in_the_end():
    async def body(client):
        await client.ask(client.compute())
        client.wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        sending = asyncio.ensure_future(
            client.send(b"".join(framed(client.compute(), tag) for tag in range(1, 201)))
        )
        await asyncio.sleep(0.02)
        assert [(await client.answer())[0] for _ in range(200)] == [*range(1, 201)]
        await sending
        # From now on answers are no longer sent by Python code.
        client.wire.send_frame = None
        assert (await client.ask(client.compute())).status == 200

    played(body)


def test_the_rest_of_an_answer_is_sent_before_what_python_code_answers_in_the_same_turn():
    async def body(client):
        client.is_captured = False
        await client.ask(client.compute())
        # No real answer is so long that the kernel takes a part of it.
        (request,) = client.connection._prepared_calls.find(msgspec.json.encode(client.compute()))
        plan = request.find_plan(None)
        described = bytes(plan.encoded_results)
        object.__setattr__(plan, "encoded_results", msgspec.Raw(described[:-1] + b" " * 100_000 + b"}"))
        client.is_captured = True
        await client.ask(client.compute())
        client.wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        await client.send(framed(client.compute(), 1) + frames.PREFIX.pack(4, 2) + b"null")
        await asyncio.sleep(0.02)
        assert [(tag, answer.status) for tag, answer in [await client.answer() for _ in range(2)]] == [
            (1, 200),
            (2, 400),
        ]
        assert client.driver.launched == [GRAPH]

    played(body)


@pytest.mark.parametrize("is_alone", [False, True])
def test_parameters_that_are_sent_along_recur_where_jobs_are_computed_alone(is_alone):
    """Else they decide which jobs share a launch, and are copied for each."""

    async def body(client):
        client.behind.executor.backend.is_better_unbatched = lambda job: is_alone
        plain = client.compute()
        tensors = {**plain.tensors, "weight": frames.TensorReference(0, 4096, "float32", (4,))}
        message = frames.ComputeMessage("layer_norm", tensors, plain.results)
        for _ in range(3):
            assert (await client.ask(message)).status == 200
        assert client.by_python == (1 if is_alone else 3)

    played(body)


@pytest.mark.parametrize("end", ["close", "free", "layers"])
def test_what_is_forgotten_keeps_no_memory_until_the_next_scrape(end):
    async def body(client):
        for _ in range(3):
            await client.ask(client.compute())
        assert len(client.recurrences) == 1
        if end == "close":
            client.theirs.close()
        elif end == "free":
            await client.send(frames.FreeSegmentMessage(0))
        else:
            client.behind.layer_messages.put_or_replace(layer(size=4))
            client.connection._prepared_calls.clear()
            await client.ask(frames.ListLayersMessage())
        while client.recurrences:
            gc.collect()
            await asyncio.sleep(0)

    played(body)
