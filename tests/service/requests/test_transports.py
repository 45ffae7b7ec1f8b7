"""Requests of every transport whose job cannot be begun give their permit and their memory back."""

import asyncio
import copy
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from normserve.admission.permits import AdmissionBudget
from normserve.codec import local_messages as frames
from normserve.engine.engine import Engine
from normserve.errors import OverloadedError
from normserve.http.relay import relay_messages
from normserve.http.transport import AsgiAdapter

from tests.garbage_collector import without_collector
from tests.service.engine.fake_engine import turn
from tests.service.http.relay.owner_scene import OwnerScene, npy
from tests.service.http.relay.test_relayed_operations_receiving import Owner
from tests.service.local.fake_wire import Client

X = np.ones((64, 1024), np.float32)


class Refused(NamedTuple):
    """The status of a response, and what is held once it has been sent."""

    status: int
    held_requests: int
    held_bytes: int
    used_slab_bytes: int
    is_idle: bool


def fail_to_begin(engine: Engine, limits: AdmissionBudget, error: Exception) -> list[int]:
    """Have the engine take no job; the bytes of the permits that were held then."""
    held: list[int] = []

    def begin(*_: object) -> None:
        held.append(limits.used_bytes)
        # The traceback of one that lives on would hold the request's memory.
        raise copy.copy(error)

    engine.submit = begin  # type: ignore[method-assign]
    return held


async def post(error: Exception, path: str, body: bytes, *headers: tuple[bytes, bytes]) -> Refused:
    """Send a request to the application of one process."""
    owner, sent = OwnerScene(), []
    await owner.open()
    service = owner.service
    held = fail_to_begin(service.engine, service.admission_budget, error)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"%d" % len(body)), *headers],
        "client": ("127.0.0.1", 1),
        "scheme": "http",
    }
    await AsgiAdapter(owner.app.state.entrance)(scope, receive, send)
    assert held[0] >= len(body)
    limits, used, idle_s = (
        service.admission_budget,
        service.slab_pool.used_bytes,
        service.stall_detector.request_progress.stalled_s,
    )
    return Refused(sent[0]["status"], limits.request_count, limits.used_bytes, used, idle_s == 0)


async def over_http(error: Exception) -> Refused:
    return await post(error, "/v1/layer_norm", npy(X), (b"content-type", b"application/x-npy"))


async def over_v2(error: Exception) -> Refused:
    x = {"name": "x", "datatype": "FP32", "shape": X.shape, "parameters": {"binary_data_size": X.nbytes}}
    header = json.dumps({"inputs": [x]}).encode()
    length = (b"inference-header-content-length", b"%d" % len(header))
    return await post(error, "/v2/models/layer_norm/infer", header + X.tobytes(), length)


async def over_front_ends(error: Exception) -> Refused:
    owner = OwnerScene()
    await owner.open()
    service = owner.service
    held, front_end = fail_to_begin(service.engine, service.admission_budget, error), owner.front_end()
    front_end.request(1, npy(X))
    status = (await front_end.answer(1)).status
    while not owner.records:
        await asyncio.sleep(0)
    assert held[0] >= X.nbytes
    limits, used, idle_s = (
        service.admission_budget,
        service.slab_pool.used_bytes,
        service.stall_detector.request_progress.stalled_s,
    )
    refused = Refused(status, limits.request_count, limits.used_bytes, used, idle_s == 0)
    await owner.close()
    return refused


async def over_front_ends_that_receive(error: Exception) -> Refused:
    owner = Owner()
    receive = await owner.started()
    held = fail_to_begin(owner.scene.engine, owner.limits, error)
    owner.come(receive, owner.body)
    [answer] = owner.said(relay_messages.ResponsePart)
    owner.asked.on_message(relay_messages.ResponseSent(receive.number, 0.0, is_delivered=True))
    assert held[0] >= len(owner.body)
    limits, used, idle_s = (
        owner.limits,
        owner.front_end.slab_pool.used_bytes,
        owner.scene.engine.launch_progress.stalled_s,
    )
    return Refused(answer.status, limits.request_count, limits.used_bytes, used, idle_s == 0)


async def over_shared_memory(error: Exception) -> Refused:
    client = Client()
    await client.start_and_capture_when_due()
    await client.request(frames.GrowArenaMessage(1))
    client.wire.sent.clear()
    held = fail_to_begin(client.engine, client.limits, error)
    client.send(client.compute(), 1)
    await turn()
    [(_, answer)] = client.wire.sent
    assert held == [32]
    limits = client.limits
    assert not client.connection.is_busy
    # All memory is the client's.
    refused = Refused(answer.status, limits.request_count, limits.used_bytes, 0, client.progress.stalled_s == 0)
    client.wire.close()
    return refused


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError("unexpected"), 500), (OverloadedError("too many kernels", 1.0), 429)]
)
@pytest.mark.parametrize(
    "refuse", [over_http, over_v2, over_front_ends, over_front_ends_that_receive, over_shared_memory]
)
def test_a_job_that_cannot_be_begun_leaves_nothing_held(
    refuse: Callable[[Exception], Any], error: Exception, status: int
):
    # Lines of the log that are kept would hold the traceback of the error, and so the memory.
    logging.disable()
    # The memory must not wait for the collector either.
    try:
        with without_collector():
            refused = asyncio.run(asyncio.wait_for(refuse(error), 20))
    finally:
        logging.disable(logging.NOTSET)
    assert refused == Refused(status, 0, 0, 0, is_idle=True)
