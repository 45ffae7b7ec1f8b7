"""CUDA shared memory as NVIDIA's client makes, fills, registers and reads it; needs a GPU."""

import numpy as np
import pytest

from tests.integration.oip.device.documented_example import ROWS, check_example, normalised

pytestmark = pytest.mark.gpu


@pytest.fixture
def triton(serving):
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(serving.url.removeprefix("http://")) as client:
        yield http, client


@pytest.fixture
def cuda():
    pytest.importorskip("cuda.bindings.runtime")
    return pytest.importorskip("tritonclient.utils.cuda_shared_memory")


def test_from_region_to_region(triton, cuda):
    http, client = triton
    source = cuda.create_shared_memory_region("x", ROWS.nbytes, 0)
    target = cuda.create_shared_memory_region("y", ROWS.nbytes, 0)
    try:
        for name, handle in (("x", source), ("y", target)):
            client.register_cuda_shared_memory(name, cuda.get_raw_handle(handle), 0, ROWS.nbytes)
        assert [each["name"] for each in client.get_cuda_shared_memory_status()] == ["x", "y"]
        assert "cuda_shared_memory" in client.get_server_metadata()["extensions"]
        x = http.InferInput("x", [*ROWS.shape], "FP32")
        x.set_shared_memory("x", ROWS.nbytes)
        y = http.InferRequestedOutput("y")
        y.set_shared_memory("y", ROWS.nbytes)
        for factor in (1, -3, 100):
            rows = factor * ROWS
            cuda.set_shared_memory_region(source, [rows])
            result = client.infer("layer_norm", [x], outputs=[y])
            assert result.get_output("y")["shape"] == [64, 1024]
            got = cuda.get_contents_as_numpy(target, np.float32, ROWS.shape)
            np.testing.assert_allclose(got, normalised(rows), atol=1e-5)
    finally:
        client.unregister_cuda_shared_memory()
        for handle in (source, target):
            cuda.destroy_shared_memory_region(handle)
    assert client.get_cuda_shared_memory_status() == []


def test_the_example_of_the_documentation_runs(triton, cuda):
    http, client = triton
    check_example(http, client, cuda)
