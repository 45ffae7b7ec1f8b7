"""The same client over asyncio."""

import asyncio

import numpy as np
import pytest
import tritonclient.http.aio as triton
from tritonclient.utils import InferenceServerException

from tests.integration.oip.models import CASES, assert_close, expected, parameters_of, random, tensor, tensors


def run(server, calls):
    async def session():
        async with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
            return await calls(client)

    return asyncio.run(session())


@pytest.mark.parametrize("op", CASES)
def test_operations_and_gradients(server, op):
    shape, channels, parameters, _ = CASES[op]
    given = {"x": random(*shape), **parameters_of(op, channels)}
    with_dy = given | {"dy": random(*shape, seed=9)}

    async def calls(client):
        return await asyncio.gather(
            client.infer(op, tensors(given), parameters=parameters),
            client.infer(op, tensors(given, binary=False), parameters=parameters),
            client.infer(f"{op}_backward", tensors(with_dy), parameters=parameters),
        )

    forward, from_json, backward = run(server, calls)
    assert_close(forward, expected(op, given), "FP32")
    assert np.array_equal(forward.as_numpy("y"), from_json.as_numpy("y"))
    assert_close(backward, expected(op, with_dy), "FP32")


def test_around_the_operations(server):
    async def calls(client):
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("layer_norm")
        assert "statistics" in (await client.get_server_metadata())["extensions"]
        assert (await client.get_model_config("rms_norm"))["name"] == "rms_norm"
        assert len(await client.get_model_repository_index()) >= 6
        (told,) = (await client.get_inference_statistics("layer_norm"))["model_stats"]
        assert told["name"] == "layer_norm"
        with pytest.raises(InferenceServerException, match="closest is 'eps'") as refused:
            await client.infer("layer_norm", [tensor("x", random(2, 8))], parameters={"ep": 1})
        assert refused.value.status() == "422"

    run(server, calls)
