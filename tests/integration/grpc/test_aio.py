"""NVIDIA's asynchronous client of gRPC."""

import asyncio

import numpy as np
import tritonclient.grpc.aio as triton

from tests.integration.grpc.requests import make_input
from tests.integration.oip.models import random


def test_many_calls_at_once(address):
    async def run():
        async with triton.InferenceServerClient(address) as client:
            given = [random(1 + place, 32, seed=place) for place in range(40)]
            results = await asyncio.gather(
                *[client.infer("layer_norm", [make_input("x", x)], request_id=str(n)) for n, x in enumerate(given)]
            )
        for place, (x, result) in enumerate(zip(given, results, strict=True)):
            assert result.get_response().id == str(place)
            wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
            np.testing.assert_allclose(result.as_numpy("y"), wanted, atol=1e-5)

    asyncio.run(run())


def test_a_stream(address):
    async def run():
        async def send():
            for place in range(5):
                yield {
                    "model_name": "layer_norm" if place != 2 else "unheard of",
                    "inputs": [make_input("x", random(3, 8))],
                    "request_id": str(place),
                }

        async with triton.InferenceServerClient(address) as client:
            answers = [each async for each in client.stream_infer(send())]
        assert [error is None for _, error in answers] == [True, True, False, True, True]
        assert [result.get_response().id for result, error in answers if error is None] == ["0", "1", "3", "4"]

    asyncio.run(run())


def test_cancelled_calls(address, speaking, until):
    async def run():
        async with triton.InferenceServerClient(address) as client:
            calls = [
                asyncio.create_task(client.infer("layer_norm", [make_input("x", random(512, 1024))]))
                for _ in range(8)
            ]
            await asyncio.sleep(0.02)
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert (await client.infer("layer_norm", [make_input("x", random(2, 8))])).as_numpy("y") is not None

    asyncio.run(run())
    with speaking.client() as api:
        # A call is withdrawn when the server sees its connection's end, or ends when it was computed.
        until(lambda: "normserve_inflight_requests 0" in api.get("/metrics").text)
