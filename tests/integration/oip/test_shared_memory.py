"""System shared memory as NVIDIA's client uses it: registered by name, tensors in it, results into it."""

import asyncio
import contextlib
import os
import warnings

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

PREFIX = f"normserve-test-{os.getpid()}-"
DTYPES = {"FP32": np.float32, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}
MIB = 2**20


@pytest.fixture(scope="module")
def sharing(launched):
    return launched("--oip-shared-memory", PREFIX)


@pytest.fixture(scope="module")
def client(sharing):
    with triton.InferenceServerClient(sharing.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def region(client):
    """Makes regions and registers them, until the test ends."""
    with contextlib.ExitStack() as stack:

        def make(name: str, nbytes: int, key: str = ""):
            key = key or PREFIX + name
            handle = shm.create_shared_memory_region(name, key, nbytes, create_only=True)
            stack.callback(shm.destroy_shared_memory_region, handle)
            client.register_system_shared_memory(name, key, nbytes)
            stack.callback(client.unregister_system_shared_memory, name)
            return handle

        yield make


def given(name: str, array: np.ndarray, datatype: str, region: str, offset: int = 0) -> triton.InferInput:
    made = triton.InferInput(name, array.shape, datatype)
    made.set_shared_memory(region, array.nbytes, offset)
    return made


def wanted(name: str, region: str, nbytes: int, offset: int = 0) -> triton.InferRequestedOutput:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory(region, nbytes, offset)
    return made


def written(handle, like: np.ndarray, offset: int = 0) -> np.ndarray:
    return shm.get_contents_as_numpy(handle, like.dtype, like.shape, offset).copy()


def normed(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)


def assert_normed(y: np.ndarray, x: np.ndarray) -> None:
    tolerance = {4: 1e-5, 2: 4e-2}[y.itemsize]
    np.testing.assert_allclose(y.astype(np.float64), normed(x), atol=tolerance)


def random(*shape: int, datatype: str = "FP32") -> np.ndarray:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(DTYPES[datatype])


def count(sharing, **labels: str) -> float:
    with sharing.client() as http:
        lines = http.get("/metrics").text.splitlines()
    of_requests = [line for line in lines if line.startswith("normserve_requests_total{")]
    return sum(
        float(line.split()[-1])
        for line in of_requests
        if all(f'{name}="{value}"' in line for name, value in labels.items())
    )


@pytest.mark.parametrize("datatype", DTYPES)
def test_both_ways_through_two_regions(client, region, sharing, datatype):
    x = random(6, 32, datatype=datatype)
    source, target = region("x", x.nbytes), region("y", x.nbytes)
    shm.set_shared_memory_region(source, [x])
    before = count(sharing, transport="oip_shm", op="layer_norm", code="200")
    result = client.infer(
        "layer_norm", [given("x", x, datatype, "x")], outputs=[wanted("y", "y", x.nbytes)], request_id="7"
    )
    assert_normed(written(target, x), x)
    said = result.get_response()
    assert said["id"] == "7"
    assert said["outputs"] == [
        {
            "name": "y",
            "datatype": datatype,
            "shape": [6, 32],
            "parameters": {
                "shared_memory_region": "y",
                "shared_memory_offset": 0,
                "shared_memory_byte_size": x.nbytes,
            },
        }
    ]
    assert count(sharing, transport="oip_shm", op="layer_norm", code="200") == before + 1


def test_statistics_count_what_lies_in_regions(client, region):
    def inferred() -> tuple[int, int]:
        (told,) = client.get_inference_statistics("rms_norm")["model_stats"]
        return told["inference_stats"]["success"]["count"], told["inference_stats"]["fail"]["count"]

    x = random(6, 32)
    region("x", x.nbytes)
    succeeded, failed = inferred()
    client.infer("rms_norm", [given("x", x, "FP32", "x")])
    status_of(lambda: client.infer("rms_norm", [given("x", x, "FP32", "none")]))
    assert inferred() == (succeeded + 1, failed + 1)


def test_one_region_for_all_and_results_over_tensors(client, region):
    x, weight, bias = random(6, 32), random(32), random(1, 32)[0]
    handle = region("all", 4096)
    shm.set_shared_memory_region(handle, [x, weight, bias], offset=64)
    places = [64, 64 + x.nbytes, 64 + x.nbytes + weight.nbytes]
    inputs = [
        given(name, array, "FP32", "all", place)
        for name, array, place in zip(["x", "weight", "bias"], [x, weight, bias], places, strict=True)
    ]
    client.infer("layer_norm", inputs, outputs=[wanted("y", "all", x.nbytes, 64)])
    np.testing.assert_allclose(written(handle, x, 64), normed(x) * weight + bias, atol=1e-5)
    assert np.array_equal(written(handle, weight, places[1]), weight)
    assert np.array_equal(written(handle, weight[:16], 0), np.zeros(16, np.float32))


def test_regions_beside_the_body(client, region):
    x, weight = random(6, 32), random(32)
    shm.set_shared_memory_region(region("x", x.nbytes), [x])
    target = region("mean", 24)
    binary = triton.InferInput("weight", [32], "FP32").set_data_from_numpy(weight)
    result = client.infer(
        "layer_norm",
        [given("x", x, "FP32", "x"), binary],
        outputs=[triton.InferRequestedOutput("y"), wanted("mean", "mean", 24)],
    )
    np.testing.assert_allclose(result.as_numpy("y"), normed(x) * weight, atol=1e-5)
    np.testing.assert_allclose(written(target, x[:, 0]), x.mean(1), atol=1e-6)


def test_gradients(client, region):
    x, dy = random(6, 32), random(6, 32) ** 2
    handle = region("all", 3 * x.nbytes)
    shm.set_shared_memory_region(handle, [x, dy])
    tensors = [given("x", x, "FP32", "all"), given("dy", dy, "FP32", "all", x.nbytes)]
    client.infer("layer_norm_backward", tensors, outputs=[wanted("dx", "all", x.nbytes, 2 * x.nbytes)])
    sent = [triton.InferInput(name, [6, 32], "FP32").set_data_from_numpy(a) for name, a in (("x", x), ("dy", dy))]
    plain = client.infer("layer_norm_backward", sent).as_numpy("dx")
    assert np.array_equal(written(handle, x, 2 * x.nbytes), plain)


def test_long_tensors(client, region):
    x = random(1024, 1024)
    source, target = region("x", 4 * MIB), region("y", 4 * MIB)
    shm.set_shared_memory_region(source, [x])
    client.infer("rms_norm", [given("x", x, "FP32", "x")], outputs=[wanted("y", "y", 4 * MIB)])
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(written(target, x), expected, atol=1e-5)
    assert np.array_equal(written(source, x), x)


def test_over_asyncio_many_at_once(sharing, client, region):
    x = random(6, 32)
    handle = region("all", 9 * x.nbytes)
    shm.set_shared_memory_region(handle, [x])

    async def calls() -> None:
        async with triton_aio.InferenceServerClient(sharing.url.removeprefix("http://")) as many:
            await asyncio.gather(
                *(
                    many.infer(
                        "layer_norm",
                        [given("x", x, "FP32", "all")],
                        outputs=[wanted("y", "all", x.nbytes, (1 + place) * x.nbytes)],
                    )
                    for place in range(8)
                )
            )
            assert [each["name"] for each in await many.get_system_shared_memory_status()] == ["all"]
            with pytest.raises(InferenceServerException, match="no region with the name 'none'"):
                await many.infer("layer_norm", [given("x", x, "FP32", "none")])

    asyncio.run(calls())
    for place in range(8):
        assert_normed(written(handle, x, (1 + place) * x.nbytes), x)


def test_status_and_unregistering(client, region):
    region("x", 128)
    region("ä b", 256, "/" + PREFIX + "slash")
    told = {each["name"]: each for each in client.get_system_shared_memory_status()}
    assert told == {
        "x": {"name": "x", "key": PREFIX + "x", "offset": 0, "byte_size": 128},
        "ä b": {"name": "ä b", "key": "/" + PREFIX + "slash", "offset": 0, "byte_size": 256},
    }
    assert client.get_system_shared_memory_status("ä b") == [told["ä b"]]
    client.unregister_system_shared_memory("x")
    client.unregister_system_shared_memory("x")
    assert [each["name"] for each in client.get_system_shared_memory_status()] == ["ä b"]
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    assert "cuda_shared_memory" not in client.get_server_metadata()["extensions"]


def status_of(call) -> str:
    with pytest.raises(InferenceServerException) as refused:
        call()
    return f"{refused.value.status()}: {refused.value.message()}"


def test_errors_are_the_clients_exceptions(client, region):
    x = random(6, 32)
    region("x", x.nbytes)
    register = client.register_system_shared_memory
    assert status_of(lambda: register("x", PREFIX + "x", 8)).startswith("400: a region with the name 'x' is reg")
    assert status_of(lambda: register("n", PREFIX + "none", 8)).startswith("400: the key is of no shared memory")
    assert status_of(lambda: register("n", "other", 8)).startswith("400: a key must begin with")
    assert status_of(lambda: register("n", PREFIX + "x", 2**40)).startswith(
        "400: a region must lie within its file"
    )
    assert status_of(lambda: client.get_system_shared_memory_status("n")).startswith("400: no region with the name")

    def infer(source="x", nbytes=x.nbytes, offset=0, room=x.nbytes, outputs=1):
        said = triton.InferInput("x", x.shape, "FP32")
        said.set_shared_memory(source, nbytes, offset)
        names = ("y", "mean")[:outputs]
        return status_of(lambda: client.infer("layer_norm", [said], outputs=[wanted(n, "x", room) for n in names]))

    assert infer(source="n").startswith("400: no region with the name 'n'")
    assert infer(nbytes=4).startswith("400: 'x' must have the 768 bytes")
    assert infer(offset=1).startswith("400: 768 bytes at offset 1 do not lie within the 768 bytes")
    assert infer(room=767).startswith("400: y has 768 bytes, and its shared_memory_byte_size allows 767")
    assert infer(room=2**62).startswith("400: 4611686018427387904 bytes at offset 0 do not lie")
    assert infer(outputs=2) == "400: y and mean would be written over each other"


def test_what_is_registered_is_counted(sharing, region):
    def told() -> list[str]:
        with sharing.client() as http:
            lines = http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("normserve_oip_region")]

    region("x", 300)
    assert told() == ["normserve_oip_regions 1.0", "normserve_oip_region_bytes 300.0"]


def test_cuda_regions_are_refused_and_can_be_forgotten(client):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = status_of(lambda: client.register_cuda_shared_memory("c", b"QUJD" * 22, 0, 8))
    assert refused == "400: raw_handle must be 64 bytes, got 66"
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory("c")
    client.unregister_cuda_shared_memory()


def test_without_the_setting_nothing_is_registered(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        told = status_of(lambda: client.register_system_shared_memory("n", PREFIX + "n", 8))
        assert told.startswith("400: this server shares no memory by names")
        assert "--oip-shared-memory PREFIX" in told
        x = random(6, 32)
        assert status_of(lambda: client.infer("layer_norm", [given("x", x, "FP32", "n")])) == told
        assert client.get_system_shared_memory_status() == []
        client.unregister_system_shared_memory("n")
        client.unregister_system_shared_memory()
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
