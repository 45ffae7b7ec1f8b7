"""CUDA shared memory as NVIDIA's client makes, fills, registers and reads it; needs a GPU."""

import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

PAGE = Path(__file__).parents[4] / "docs/coming-from-triton.md"
ROWS = np.random.default_rng(7).standard_normal((64, 1024)).astype(np.float32)


@pytest.fixture
def triton(serving):
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(serving.url.removeprefix("http://")) as client:
        yield http, client


@pytest.fixture
def cuda():
    pytest.importorskip("cuda.bindings.runtime")
    return pytest.importorskip("tritonclient.utils.cuda_shared_memory")


def normalised(rows):
    wide = rows.astype(np.float64)
    return (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)


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
    *_, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    known = {"hidden": ROWS, "client": client, "triton": http}
    try:
        exec(code, known)
        both = cuda.get_contents_as_numpy(known["region"], np.float32, (2, *ROWS.shape))
        np.testing.assert_allclose(both[1], normalised(ROWS), atol=1e-5)
    finally:
        client.unregister_cuda_shared_memory()
        if "region" in known:
            cuda.destroy_shared_memory_region(known["region"])
