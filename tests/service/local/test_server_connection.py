"""One client's connection: what its frames lead to, in which order, and what is left once it is gone."""

import asyncio
import hashlib
import time
import weakref

import msgspec
import pytest
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.codec import local_messages as frames
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, TooLargeError
from normserve.local import server_connection
from normserve.local.server_connection import MOST_UNDER_WAY

from tests.garbage_collector import without_collector
from tests.service.engine.fake_engine import turn
from tests.service.engine.fake_polling import FakePolling
from tests.service.jobs.fake_jobs import layer
from tests.service.local.fake_wire import Client, played


def test_an_operation_is_answered_where_its_result_lies():
    async def body(client):
        client.send(client.compute(), 5)
        assert not client.wire.sent
        await client.finish()
        [(tag, answer)] = client.wire.sent
        assert (tag, answer.status, answer.batch_size) == (5, 200, 1)
        assert answer.results == {"y": frames.TensorReference(0, 2**19, "float32", (2, 4))}
        assert set(answer.stages_ms) == {"recv", "queue", "copy_in", "kernel", "copy_out"}
        assert len(answer.request_id) == 32

    played(body)


def test_each_message_of_a_frame_has_a_tag_of_its_own():
    async def body(client):
        client.send([client.compute(), client.compute(offset=64)], 2**32 - 1)
        await client.finish()
        assert client.statuses() == {2**32 - 1: 200, 0: 200}

    played(body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 30_000,
        b'{"do": "nothing"}',
        b'{"do": "grow", "nbytes": -1}',
        b'{"do": "grow", "nbytes": 1, "more": 1}',
        b'{"do": "cancel", "request": 1e999}',
        msgspec.json.encode([{"do": "info"}] * 65),
    ],
)
def test_what_is_no_message_is_refused_and_the_connection_goes_on(content):
    async def body(client):
        for _ in range(2):
            client.send(content, 3)
        assert [(tag, answer.status) for tag, answer in client.wire.sent] == [(3, 400)] * 2
        client.send(client.compute(), 4)
        await client.finish()
        assert client.statuses()[4] == 200

    played(body)


def test_before_hello_nothing_is_done():
    async def run():
        client = Client()
        await client.start_and_capture_when_due(greet=False)
        for message in (
            frames.GrowArenaMessage(1),
            frames.GetInfoMessage(),
            frames.ListLayersMessage(),
            frames.GetLayerMessage("a"),
            client.compute(),
        ):
            answer = await client.request(message)
            assert (answer.status, answer.segment) == (400, None)
            assert "hello" in answer.problem["detail"]
        assert client.host_allocator.nbytes == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_beyond_the_most_wait_and_nothing_more_is_read():
    async def body(client):
        for tag in range(MOST_UNDER_WAY):
            client.send(client.compute(), tag)
        assert client.wire.is_wanted
        client.send([client.compute()] * 3, 100)
        assert not client.wire.is_wanted
        assert client.limits.request_count == MOST_UNDER_WAY
        await client.finish()
        assert len(client.statuses()) == MOST_UNDER_WAY + 3
        assert set(client.statuses().values()) == {200}
        assert client.wire.is_wanted

    # One that has waited is begun with the permit of the one that has ended.
    played(body, most_requests=MOST_UNDER_WAY)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (
            frames.PutLayerMessage("a", "op=layer_norm", {"weight": frames.TensorReference(0, 0, "float32", (4,))}),
            201,
        ),
        (
            frames.PutLayerMessage("a", "op=group_norm", {"weight": frames.TensorReference(0, 0, "float32", (4,))}),
            422,
        ),
        (
            frames.PutLayerMessage("a", "op=layer_norm", {"scale": frames.TensorReference(0, 0, "float32", (4,))}),
            422,
        ),
        (frames.DeleteLayerMessage("there"), 204),
        (frames.DeleteLayerMessage("nowhere"), 404),
    ],
)
def test_a_change_of_layers_that_is_answered_leaves_nothing_to_be_done(message, status):
    async def body(client):
        there = frames.PutLayerMessage(
            "there", "op=rms_norm", {"weight": frames.TensorReference(0, 0, "float32", (4,))}
        )
        assert (await client.request(there)).status == 201
        assert (await client.request(message)).status == status
        await turn()
        assert client.progress.is_idle
        assert client.limits.request_count == client.limits.used_bytes == 0

    played(body)


@pytest.mark.parametrize(
    "change",
    [lambda layers: layers.remove("a"), lambda layers: layers.put_or_replace(layer("a"))],
    ids=["removed", "replaced"],
)
def test_prepared_calls_do_not_keep_a_layer_that_is_not_registered_any_more(change):
    async def body(client):
        client.layer_messages.put_or_replace(layer("a"))
        for tag in range(2):
            client.send(client.compute(query="layer=a"), tag)
            await client.finish()
        assert client.statuses() == {0: 200, 1: 200}
        former = weakref.ref(client.layer_messages.get("a"))
        with without_collector():
            change(client.layer_messages)
            assert former() is None

    played(body)


def test_messages_that_wait_keep_their_order():
    async def body(client):
        # What fills the connection, and then: let the segment go before the last, which is not there any more.
        for tag in range(MOST_UNDER_WAY):
            client.send(frames.GetInfoMessage(), tag)
        client.send([client.compute(), frames.FreeSegmentMessage(0), client.compute(offset=16)], 100)
        client.described.set()
        await turn()
        await client.finish()
        assert {tag: client.statuses()[tag] for tag in (100, 102)} == {100: 200, 102: 422}

    played(body)


@pytest.mark.parametrize("limit", [1, 2])
def test_what_is_refused_gives_room(limit):
    async def body(client):
        client.send([client.compute()] * 64, 0)
        client.send([client.compute()] * 64, 64)
        await client.finish()
        assert len(client.statuses()) == 128
        assert set(client.statuses().values()) == {200, 429}
        assert client.wire.is_wanted

    played(body, most_requests=limit)


def test_a_frame_that_comes_again_is_checked_by_what_holds_now():
    async def body(client):
        content = msgspec.json.encode(client.compute(query="layer=a"))
        for status, change in [
            (404, lambda: client.layer_messages.put_or_replace(layer("a"))),
            (200, lambda: client.layer_messages.put_or_replace(layer("a", size=8))),
            (422, lambda: client.layer_messages.put_or_replace(layer("a"))),
            (200, lambda: client.send(frames.FreeSegmentMessage(0))),
            (422, lambda: None),
        ]:
            client.wire.sent.clear()
            client.send(content, 1)
            await client.finish()
            assert client.statuses() == {1: status}
            change()

    played(body)


def test_frames_of_a_step_with_many_norms_are_parsed_in_the_first_step_only(monkeypatch):
    async def body(client):
        parsed = []
        read_messages = frames.decode_messages
        monkeypatch.setattr(
            frames, "decode_messages", lambda content: parsed.append(content) or read_messages(content)
        )
        for _ in range(3):
            for tag in range(200):
                client.send(client.compute(query=f"eps={tag + 1}e-5"), tag)
                await client.finish()
        assert len(parsed) == 200

    played(body)


@pytest.fixture
def parsed(monkeypatch):
    """The frames that have been parsed."""
    parsed = []
    read_messages = frames.decode_messages
    monkeypatch.setattr(frames, "decode_messages", lambda content: parsed.append(content) or read_messages(content))
    return parsed


@pytest.mark.parametrize("messages", [1, 8, 60])
def test_frames_by_the_thousand_are_kept_by_their_bytes(parsed, messages):
    async def body(client):
        prepared = client.connection._prepared_calls
        parsed.clear()
        sent = []
        for tag in range(2000 // messages):
            sent.append([client.compute(query=f"eps={tag + 1}e-5")] * messages)
            client.send(sent[-1], tag)
            await client.finish()
            assert prepared.nbytes <= 8 * 2**20
        assert prepared.nbytes > 7 * 2**20
        assert len(parsed) == len(sent)
        # The last ones are there, and the first are not.
        client.send(sent[-1], 0)
        assert len(parsed) == len(sent)
        client.send(sent[0], 0)
        assert len(parsed) == len(sent) + 1
        await client.finish()

    played(body)


def test_a_connection_with_endless_frames_evicts_nothing_of_another(parsed):
    async def body(client):
        other = client.connect()
        frame = msgspec.json.encode(client.compute())
        client.send(frame, 1)
        await client.finish()
        for tag in range(1500):
            now = time.perf_counter()
            other.on_frame(tag, msgspec.json.encode(client.compute(query=f"eps={tag + 1}e-5")), now, now)
        parsed.clear()
        client.send(frame, 2)
        await client.finish()
        assert parsed == []
        assert client.statuses() == {1: 200, 2: 200}

    played(body)


def test_key_and_rate_are_checked_for_each_frame_that_comes_again(parsed):
    def key(*scopes, **limits):
        return ApiKey("batch", hashlib.sha256(b"secret").digest(), frozenset(scopes), **limits)

    async def body(client):
        async def status() -> int:
            client.wire.sent.clear()
            client.send(client.compute(), 1)
            await client.finish()
            return client.statuses()[1]

        await client.start_and_capture_when_due(greet=False)
        assert (await client.request(frames.HelloMessage(frames.VERSION, "secret"))).status == 200
        assert (await client.request(frames.GrowArenaMessage(1))).status == 200
        parsed.clear()
        statuses = [await status()]
        for changed in ([key(KeyScope.INFER, requests_per_second=1e-6)], [key(KeyScope.LAYERS)], []):
            client.keys.replace_keys(changed)
            statuses += [await status() for _ in range(2)]
        assert statuses == [200, 200, 429, 403, 403, 401, 401]
        assert len(parsed) == 1

    async def run():
        keys = Keyring([key(KeyScope.INFER)])
        client = Client(keys=keys)
        client.keys = keys
        try:
            await body(client)
        finally:
            client.wire.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_only_operations_without_a_span_are_kept(parsed):
    async def body(client):
        traced = msgspec.structs.replace(client.compute(), traceparent=f"00-{1:032x}-{1:016x}-01")
        for message in (
            traced,
            frames.GetInfoMessage(),
            frames.HelloMessage(frames.VERSION),
            [client.compute(), frames.CancelRequestMessage(9)],
        ):
            content = msgspec.json.encode(message)
            for _ in range(2):
                parsed.clear()
                client.send(content, 1)
                await client.finish()
                assert parsed == [content]

    played(body)


@pytest.mark.parametrize("number", [1, 2**63 - 1])
def test_what_is_not_there_is_let_go_in_silence(number):
    async def body(client):
        client.send([frames.FreeSegmentMessage(number), frames.CancelRequestMessage(number)], 9)
        client.send(frames.CancelRequestMessage(9))
        await turn()
        assert client.wire.sent == []

    played(body)


def test_what_waits_can_be_taken_back_and_what_runs_cannot():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        client.send(client.compute(), 2)
        await turn()
        client.send([frames.CancelRequestMessage(1), frames.CancelRequestMessage(2)])
        await turn()
        assert client.statuses() == {2: 499}
        await client.finish()
        assert client.statuses() == {1: 200, 2: 499}

    played(body)


def test_what_is_taken_back_is_what_was_named():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        for tag in (2, 3, 4):
            client.send(client.compute(offset=64 * tag), tag)
        await turn()
        client.send(frames.CancelRequestMessage(3))
        await turn()
        assert client.statuses() == {3: 499}
        await client.finish()
        assert client.statuses() == {1: 200, 2: 200, 3: 499, 4: 200}

    played(body)


def test_an_error_of_the_device_is_the_answer_and_the_connection_goes_on():
    async def body(client):
        client.send(client.compute(), 1)
        await client.finish(DeviceOutOfMemoryError("there is no memory"))
        [(tag, answer)] = client.wire.sent
        assert (tag, answer.status) == (1, answer.problem["status"])
        assert answer.problem["request_id"] == answer.request_id
        assert client.wire.is_open

    played(body)


def test_an_unknown_error_is_not_told(caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("the secret of another client")

    monkeypatch.setattr(server_connection, "make_response_and_complete_record", fail)

    async def body(client):
        client.send(client.compute(), 1)
        await client.finish()
        [(_, answer)] = client.wire.sent
        assert answer.status == 500
        assert "secret" not in str(msgspec.json.encode(answer))
        assert "secret" in caplog.text

    played(body)


def test_a_device_that_failed_ends_the_connection_without_an_answer():
    # The job may run still, and would write where the client keeps something else once it is answered.
    async def body(client):
        client.send(client.compute(), 1)
        await client.finish(DeviceFailureError("it hangs"))
        assert client.wire.sent == []
        assert not client.wire.is_open

    played(body)


def test_a_fault_of_the_wire_is_told_and_ends_the_connection():
    async def body(client):
        client.send(client.compute(), 1)
        client.connection.on_fault(TooLargeError("a frame is too long"))
        assert client.statuses() == {0: 413}
        assert not client.wire.is_open

    played(body)


def test_who_leaves_is_forgotten_with_all_that_waits():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        for tag in range(2, 100):
            client.send(client.compute(), tag)
        client.wire.close()
        assert [len(segment) for segment in client.left] == [2**20]
        await turn()
        # One runs, for nobody.
        assert len(client.executor.running) == 1
        client.executor.finish()
        await turn()
        assert client.executor.running == []
        assert client.wire.sent == []

    played(body)


def test_requests_and_responses_are_noted_for_polling():
    polling = FakePolling()

    async def body(client):
        object.__setattr__(client.service, "busy_poller", polling)
        for tag in range(3):
            client.send(client.compute(), tag)
            await client.finish()

    played(body)
    assert polling.noted == ["received", "sent"] * 3
