"""What remains of a call at its end, its own or the server's."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from normserve.grpc.schema import INFERENCE, get_message_class

from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_address
from tests.integration.oip.models import random

X = random(4, 8)


@pytest.fixture
def gated(stage_of):
    """A server whose device waits for a gate."""
    return stage_of("--grpc-port", "0")


def test_calls_in_progress_are_finished_when_the_server_ends(gated):
    address = find_gateway_address(gated.server)
    first = gated.occupy_device()
    results = []

    def infer():
        with triton.InferenceServerClient(address) as client:
            results.append(client.infer("layer_norm", [make_input("x", X)]).as_numpy("y"))

    calls = [threading.Thread(target=infer) for _ in range(3)]
    for each in calls:
        each.start()
    gated.wait_for_queue(3)
    gated.server.terminate()
    gated.until(lambda: gated.server.log.count("draining") == 2)
    with triton.InferenceServerClient(address) as late, pytest.raises(triton.InferenceServerException):
        late.infer("layer_norm", [make_input("x", X)], client_timeout=5)
    gated.open_gate()
    for each in calls:
        each.join()
    assert [np.isfinite(each).all() for each in results] == [True] * 3
    assert first.result().status_code == 200
    assert gated.server.wait() == 0


@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_a_call_that_is_given_up_is_withdrawn_before_it_is_computed(gated, way):
    address = find_gateway_address(gated.server)
    first = gated.occupy_device()

    async def run():
        async with triton_aio.InferenceServerClient(address) as client:
            timeout = 1.0 if way == "deadline" else None
            calls = [
                asyncio.create_task(client.infer("layer_norm", [make_input("x", X)], client_timeout=timeout))
                for _ in range(3)
            ]
            await asyncio.to_thread(gated.wait_for_queue, 3)
            if way == "cancel":
                for each in calls:
                    each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())
    gated.wait_for_queue(0)
    metrics = gated.http.get("/metrics").text
    assert (
        'normserve_requests_total{op="layer_norm",pass="forward",dtype="float32",transport="grpc",code="499"} 3'
        in (metrics)
    )
    gated.open_gate()
    assert first.result().status_code == 200


def test_an_open_stream_ends_with_the_server(start_server):
    server = start_server("--grpc-port", "0")
    address = find_gateway_address(server)
    request = get_message_class("inference.ModelInferRequest")(model_name="unheard of").SerializeToString()
    ended = threading.Event()

    def send():
        yield request
        ended.wait(60)

    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(send())
        assert b"no model" in next(stream)
        server.terminate()
        assert server.wait() == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        ended.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
