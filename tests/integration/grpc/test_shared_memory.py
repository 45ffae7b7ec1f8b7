"""System shared memory as NVIDIA's client of gRPC uses it: tensors in it, results into it."""

import base64
import contextlib
import warnings

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.integration.grpc.conftest import PREFIX
from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_address, launch_gateway
from tests.integration.oip.models import DATATYPES, NAMES, random

TOLERANCES = {"FP32": 1e-5, "FP16": 4e-3, "BF16": 4e-2}


@pytest.fixture
def region(client):
    """Makes regions and registers them, until the test ends."""
    with contextlib.ExitStack() as stack:

        def make(name, nbytes):
            handle = shm.create_shared_memory_region(name, PREFIX + name, nbytes, create_only=True)
            stack.callback(shm.destroy_shared_memory_region, handle)
            client.register_system_shared_memory(name, PREFIX + name, nbytes)
            stack.callback(client.unregister_system_shared_memory, name)
            return handle

        yield make


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tensors_in_and_out(client, region, datatype):
    x = random(16, 64, datatype=datatype)
    handle = region("both", 2 * x.nbytes)
    shm.set_shared_memory_region(handle, [x])
    given = triton.InferInput("x", x.shape, NAMES[x.dtype])
    given.set_shared_memory("both", x.nbytes)
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("both", x.nbytes, x.nbytes)
    statistics = triton.InferRequestedOutput("mean")
    result = client.infer("layer_norm", [given], outputs=[wanted, statistics])
    wide = x.astype(np.float64)
    y = shm.get_contents_as_numpy(handle, x.dtype, x.shape, x.nbytes).astype(np.float64)
    normed = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, normed, atol=TOLERANCES[datatype])
    np.testing.assert_allclose(result.as_numpy("mean"), wide.mean(1), atol=1e-3)
    assert result.get_output("y").parameters["shared_memory_region"].string_param == "both"


def test_regions_beside_raw_tensors(client, region):
    x, weight = random(4, 8), random(8, seed=3)
    handle = region("weights", weight.nbytes)
    shm.set_shared_memory_region(handle, [weight])
    given = triton.InferInput("weight", weight.shape, "FP32")
    given.set_shared_memory("weights", weight.nbytes)
    got = client.infer("layer_norm", [given, make_input("x", x)]).as_numpy("y")
    raw = client.infer("layer_norm", [make_input("x", x), make_input("weight", weight)]).as_numpy("y")
    assert np.array_equal(got, raw)


def test_regions_are_the_servers_whichever_gateway_registered_them(client, speaking, region):
    x = random(4, 8)
    shm.set_shared_memory_region(region("lasting", x.nbytes), [x])
    given = triton.InferInput("x", x.shape, "FP32")
    given.set_shared_memory("lasting", x.nbytes)
    before = client.infer("layer_norm", [given]).as_numpy("y")
    other = launch_gateway("--listen", "127.0.0.1:0", "--server", speaking.url)
    try:
        with triton.InferenceServerClient(find_gateway_address(other)) as elsewhere:
            assert np.array_equal(elsewhere.infer("layer_norm", [given]).as_numpy("y"), before)
    finally:
        other.stop()


def test_regions_are_listed_and_unregistered(client, region):
    region("one", 64)
    region("two", 128)
    listed = client.get_system_shared_memory_status().regions
    assert {name: (each.key, each.byte_size) for name, each in listed.items()} == {
        "one": (PREFIX + "one", 64),
        "two": (PREFIX + "two", 128),
    }
    assert list(client.get_system_shared_memory_status("two").regions) == ["two"]
    client.unregister_system_shared_memory("one")
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions
    client.unregister_cuda_shared_memory()
    assert not client.get_cuda_shared_memory_status().regions


def test_what_http_refuses_is_refused(client):
    for name, key, expected in (("one", "another-prefix", "must begin"), ("", PREFIX + "x", "name the region")):
        with pytest.raises(InferenceServerException, match=expected) as caught:
            client.register_system_shared_memory(name, key, 64)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InferenceServerException, match="--oip-cuda-shared-memory"):
            client.register_cuda_shared_memory("one", base64.b64encode(bytes(64)), 0, 64)
