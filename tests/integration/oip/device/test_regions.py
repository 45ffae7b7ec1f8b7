"""CUDA shared memory that another process than the server has allocated; needs a GPU."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from normserve.client import Client
from torch import nn

from tests.integration.clients.device.serving import ONCE, metric
from tests.integration.oip.device.regions import infer, register, registered

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def memory():
    """An allocation of its own: more than torch's allocator divides."""
    yield torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()


def places(memory, dtype, *shapes):
    """Tensors side by side in the memory, each at a multiple of 256 bytes."""
    made, start = [], 0
    for shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        made.append(memory[start : start + nbytes].view(dtype).view(shape))
        start += -(-nbytes // 256) * 256
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_those_of_v1_to_the_bit(serving, http, memory, dtype):
    x, weight, bias, dy, y, dx, dweight, dbias = places(
        memory, dtype, (37, 1024), (1024,), (1024,), (37, 1024), (37, 1024), (37, 1024), (1024,), (1024,)
    )
    region = registered(http, "r", memory)
    given = {"x": x, "weight": weight, "bias": bias}
    with Client(serving.url, retries=ONCE) as v1:
        for _ in range(4):
            for tensor in (*given.values(), dy):
                tensor.normal_()
            before = metric(serving, "requests_total", 'transport="oip_cuda"')
            response = infer(http, "layer_norm", region, given, {"y": y}, eps=1e-3)
            assert response.status_code == 200, response.text
            assert metric(serving, "requests_total", 'transport="oip_cuda"') == before + 1
            assert torch.equal(y, v1.layer_norm(x, weight, bias, eps=1e-3).y)
            gradients = {"dx": dx, "dweight": dweight}
            sent = {"x": x, "dy": dy, "weight": weight}
            response = infer(http, "layer_norm_backward", region, sent, gradients)
            assert response.status_code == 200, response.text
            right = v1.layer_norm_backward(dy, x, weight)
            assert torch.equal(dx, right.dx)
            assert torch.equal(dweight, right.dweight)
    assert not dbias.any()


def test_other_operations_and_statistics(serving, http, memory):
    x, y, rstd, image, normed = places(
        memory, torch.float32, (64, 512), (64, 512), (64,), (2, 32, 16, 16), (2, 32, 16, 16)
    )
    region = registered(http, "r", memory)
    x.normal_()
    image.normal_()
    assert infer(http, "rms_norm", region, {"x": x}, {"y": y, "rstd": rstd}, eps=1e-6).status_code == 200
    torch.testing.assert_close(y, nn.functional.rms_norm(x, (512,), eps=1e-6), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd, x.square().mean(-1).add(1e-6).rsqrt(), rtol=1e-5, atol=1e-5)
    response = infer(http, "group_norm", region, {"x": image}, {"y": normed}, num_groups=8)
    assert response.status_code == 200, response.text
    torch.testing.assert_close(normed, nn.functional.group_norm(image, 8), rtol=1e-5, atol=1e-5)


def test_a_registered_layer_is_a_model(serving, http, memory):
    x, y = places(memory, torch.float32, (64, 1024), (64, 1024))
    region = registered(http, "r", memory)
    weight, bias = torch.randn(2, 1024)
    with Client(serving.url, retries=ONCE) as v1:
        v1.put_layer("norm", "layer_norm", weight.numpy(), bias.numpy(), eps=1e-5)
        x.normal_()
        response = infer(http, "norm", region, {"x": x}, {"y": y})
        assert response.status_code == 200, response.text
    expected = nn.functional.layer_norm(x, (1024,), weight.cuda(), bias.cuda())
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_y_over_x(http, memory):
    (x,) = places(memory, torch.float32, (4096, 1024))
    region = registered(http, "r", memory)
    for _ in range(4):
        x.normal_()
        expected = nn.functional.layer_norm(x, (1024,))
        assert infer(http, "layer_norm", region, {"x": x}, {"y": x}).status_code == 200
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def test_the_extent_is_what_the_driver_says(http, memory):
    region = registered(http, "r", memory)
    for nbytes in (0, region.nbytes + 1, 2**40, 2**63 - 1):
        assert register(http, "other", region.handle, nbytes).status_code == 400
    for nothing in (bytes(64), os.urandom(64)):
        assert register(http, "other", nothing, MIB).status_code == 400
    assert [each["name"] for each in http.get("/v2/cudasharedmemory/status").json()] == ["r"]
    x, y = places(memory, torch.float32, (4, 256), (4, 256))
    assert infer(http, "layer_norm", region, {"x": x}, {"y": y}).status_code == 200


def test_the_same_handle_twice(http, memory):
    x, y = places(memory, torch.float32, (64, 1024), (64, 1024))
    first, second = registered(http, "a", memory), registered(http, "b", memory)
    for region, other in ((first, second), (second, first)):
        x.normal_()
        assert http.post(f"/v2/cudasharedmemory/region/{other.name}/unregister").status_code == 200
        assert infer(http, "layer_norm", region, {"x": x}, {"y": y}).status_code == 200
        torch.testing.assert_close(y, nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)
        registered(http, other.name, memory)


def test_a_region_that_comes_and_goes_while_it_is_used(serving, http, memory):
    x, y = places(memory, torch.float32, (4096, 1024), (4096, 1024))
    x.normal_()
    region = registered(http, "r", memory)
    ended = threading.Event()

    def change() -> None:
        with serving.client() as other:
            while not ended.is_set():
                other.post("/v2/cudasharedmemory/unregister")
                register(other, "r", region.handle, region.nbytes)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        statuses = [infer(http, "layer_norm", region, {"x": x}, {"y": y}).status_code for _ in range(300)]
    finally:
        ended.set()
        changing.join()
    assert {*statuses} <= {200, 400}
    assert 200 in statuses
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)


def test_nothing_of_it_stays_mapped(http, until):
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(20):
        memory = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
        x, y = places(memory, torch.float32, (64, 1024), (64, 1024))
        region = registered(http, "r", memory)
        assert infer(http, "layer_norm", region, {"x": x}, {"y": y}).status_code == 200
        assert http.post("/v2/cudasharedmemory/region/r/unregister").status_code == 200
        del memory, x, y
        torch.cuda.empty_cache()
    # The pools of both processes may grow meanwhile, and others take memory for a while; five times as much was
    # registered.
    until(lambda: free - torch.cuda.mem_get_info()[0] < 1024 * MIB)


CLIENT = """
    import sys, httpx, torch
    from tests.integration.oip.device.regions import infer, registered
    http = httpx.Client(base_url=sys.argv[1])
    memory = torch.randn(2, 4096, 1024, device="cuda")
    region = registered(http, "killed", memory)
    infer(http, "layer_norm", region, {"x": memory[0]}, {"y": memory[1]})
    print("ready", flush=True)
    while True:
        infer(http, "layer_norm", region, {"x": memory[0]}, {"y": memory[1]})
"""


def test_a_client_that_is_killed_harms_nobody(serving, http, memory):
    x, y = places(memory, torch.float32, (64, 1024), (64, 1024))
    region = registered(http, "r", memory)
    x.normal_()
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), serving.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        client.send_signal(signal.SIGKILL)
    assert http.post("/v2/cudasharedmemory/region/killed/unregister").status_code == 200
    for _ in range(50):
        assert infer(http, "layer_norm", region, {"x": x}, {"y": y}).status_code == 200
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)
