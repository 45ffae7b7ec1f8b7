"""CUDA shared memory as NVIDIA's client registers it, with a device whose memory is the host's."""

import base64
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from normserve.memory.device_segments import ShareableDevice
from tritonclient.utils import InferenceServerException

from tests.service.memory.allocations import allocation_of
from tests.service.memory.fake_driver import FakeDriver, bytes_at

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "tests/integration/harness/device_server.py")
NBYTES = 2**21
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


@pytest.fixture(scope="module")
def client(launched):
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    server = launched("--oip-cuda-shared-memory", script=SCRIPT, env=environment)
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def allocation():
    """Its bytes as float32, and its handle as the client takes it."""
    device = ShareableDevice(0, FakeDriver())
    address = device.driver.allocate(NBYTES)
    handle = base64.b64encode(allocation_of(device, address).handle)
    yield np.frombuffer(bytes_at(address, NBYTES), np.float32), handle
    device.driver.free(address)


def test_from_region_to_region(client, allocation):
    memory, handle = allocation
    client.register_cuda_shared_memory("c", handle, 0, NBYTES)
    assert client.get_cuda_shared_memory_status() == [{"name": "c", "device_id": 0, "byte_size": NBYTES}]
    assert client.get_cuda_shared_memory_status("c")[0]["name"] == "c"
    assert client.get_system_shared_memory_status() == []
    memory[:24] = X.ravel()
    x = triton.InferInput("x", [2, 12], "FP32")
    x.set_shared_memory("c", X.nbytes)
    y, mean, rstd = [triton.InferRequestedOutput(name) for name in ("y", "mean", "rstd")]
    y.set_shared_memory("c", X.nbytes, offset=4096)
    mean.set_shared_memory("c", 64, offset=8192)
    rstd.set_shared_memory("c", 64, offset=8256)
    with pytest.raises(InferenceServerException, match="rstd has none"):
        client.infer("layer_norm", [x], outputs=[y, mean])
    result = client.infer("layer_norm", [x], outputs=[rstd, y, mean], request_id="7")
    assert [each["name"] for each in result.get_response()["outputs"]] == ["rstd", "y", "mean"]
    np.testing.assert_allclose(memory[2048:2050], X.mean(1), atol=1e-6)
    wanted = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(memory[1024:1048].reshape(2, 12), wanted, atol=1e-5)
    client.unregister_cuda_shared_memory("c")
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="no region with the name 'c' is registered"):
        client.infer("layer_norm", [x], outputs=[y])


def test_errors_are_the_clients_exceptions(client, allocation):
    _, handle = allocation
    with pytest.raises(InferenceServerException, match="must have the"):
        client.register_cuda_shared_memory("c", handle, 0, NBYTES + 1)
    with pytest.raises(InferenceServerException, match="the handle must be of memory"):
        client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, NBYTES)
    assert client.get_cuda_shared_memory_status() == []
    assert "cuda_shared_memory" in client.get_server_metadata()["extensions"]
