"""Operations of local clients: their deadlines, their permits, and the memory of those that are abandoned."""

import asyncio
import gc
import hashlib
import time

import pytest
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.codec import local_messages as frames
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, DrainingError

from tests.service.engine.fake_engine import turn
from tests.service.local.fake_wire import MIB, Client, played


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("by", ["the request", "the server"])
def test_what_waits_beyond_its_deadline_is_refused_and_not_run(by):
    async def body(client):
        if by == "the server":
            object.__setattr__(client.service.request_services, "timeout_ms", 20.0)
        client.send(client.compute(query="timeout_ms=20000"), 1)
        await turn()
        began = time.perf_counter()
        client.send(client.compute(offset=64, query="" if by == "the server" else "timeout_ms=20"), 2)
        await until(lambda: client.wire.sent)
        assert time.perf_counter() - began >= 0.015
        [(tag, answer)] = client.wire.sent
        assert (tag, answer.status, answer.problem["code"]) == (2, 504, "deadline_exceeded")
        # The one that runs is late no more.
        assert client.limits.request_count == 1
        await client.finish()
        assert client.statuses() == {1: 200, 2: 504}
        assert client.executor.running == []

    played(body)


def test_a_request_whose_time_was_over_before_it_came_is_refused_at_once():
    async def body(client):
        client.send(client.compute(query="timeout_ms=0.001"), 1)
        await until(lambda: client.wire.sent)
        assert client.statuses() == {1: 504}
        assert client.executor.running == []

    played(body)


def test_a_permit_covers_the_tensors_and_the_results_until_the_answer():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        # Results of few bytes are not charged.
        assert (client.limits.request_count, client.limits.used_bytes) == (1, 32)
        await client.finish()
        assert (client.limits.request_count, client.limits.used_bytes) == (0, 0)
        await client.request(frames.GrowArenaMessage(2 * MIB))
        client.send(
            frames.ComputeMessage(
                "layer_norm",
                {"x": frames.TensorReference(1, 0, "float32", (2**15, 4))},
                {"y": frames.SegmentRange(1, MIB, 2**19)},
            ),
            2,
        )
        await turn()
        assert client.limits.request_count == 1
        assert client.limits.used_bytes >= 2**20
        await client.finish()

    played(body)


@pytest.mark.parametrize(
    "error", [DeviceOutOfMemoryError("dry"), DeviceFailureError("it hangs"), DrainingError("the server ends")]
)
def test_a_request_that_fails_gives_its_permit_back(error):
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        assert client.limits.request_count == 1
        await client.finish(error)
        assert (client.limits.request_count, client.limits.used_bytes) == (0, 0)

    played(body)


@pytest.mark.parametrize(
    ("limit", "status"),
    [({"max_inflight_bytes": 16}, 413), ({"max_inflight_bytes": 48}, 429)],
    ids=["ever", "now"],
)
def test_a_key_has_no_more_inside_than_its_quota(limit, status):
    key = ApiKey("batch", hashlib.sha256(b"secret").digest(), frozenset([KeyScope.INFER]), **limit)

    async def run():
        client = Client(keys=Keyring([key], clock=lambda: 0.0))
        await client.start_and_capture_when_due(greet=False)
        await client.request(frames.HelloMessage(frames.VERSION, "secret"))
        await client.request(frames.GrowArenaMessage(1))
        client.wire.sent.clear()
        for tag in (1, 2):
            client.send(client.compute(offset=64 * tag), tag)
            await turn()
        await client.finish()
        assert client.statuses() == ({1: 413, 2: 413} if status == 413 else {1: 200, 2: 429})
        assert (client.limits.request_count, client.limits.used_bytes) == (0, 0)
        client.wire.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_who_leaves_keeps_the_permit_and_the_memory_of_what_runs_until_the_device_is_done():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        client.wire.close()
        # Nobody but the job that runs has the segment now.
        client.left.clear()
        await turn()
        gc.collect()
        assert client.limits.request_count == 1
        assert client.host_allocator.nbytes == MIB
        client.executor.finish()
        await turn()
        assert client.limits.request_count == 0
        for _ in range(100):
            gc.collect()
            if client.host_allocator.nbytes == 0:
                break
            await turn()
        assert client.host_allocator.nbytes == 0

    played(body)


def test_who_leaves_is_counted_as_such():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        client.wire.close()
        client.executor.finish()
        await turn()
        assert 'code="499"' in client.scene.metrics.render().decode()

    played(body)
