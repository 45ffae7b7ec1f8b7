"""Calls that recur until they are answered without Python code in the server; needs a GPU."""

import multiprocessing
import re

import httpx
import pytest
import torch
from normserve.client import Client
from normserve.client import torch as remote

from tests.integration.clients.device.serving import ONCE

pytestmark = pytest.mark.gpu

# A result lies at one of two places; of either, more than make a launch worth its capture.
CALLS = 600


def replayed(serving) -> int:
    """Requests of local clients that were answered so: others have no stage in which they are sent."""
    found = re.search(
        r'^normserve_stage_duration_seconds_count{stage="send"} (\S+)$', scraped(serving), re.MULTILINE
    )
    return int(float(found.group(1))) if found else 0


def scraped(serving) -> str:
    return httpx.get(serving.url + "/metrics").text


@pytest.mark.parametrize("device", ["cuda", None])
@pytest.mark.parametrize("rows", [1, 200])
def test_results_are_of_what_lies_there_at_the_time(serving, local, until, device, rows):
    x = local.empty((rows, 256), torch.float32, device=device)
    before = replayed(serving)
    for _ in range(CALLS):
        result = local.layer_norm(x.normal_(), eps=1e-5).y
        torch.testing.assert_close(
            result, torch.nn.functional.layer_norm(x, (256,), eps=1e-5), rtol=1e-5, atol=1e-5
        )
    until(lambda: replayed(serving) - before > CALLS // 10)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_lie_elsewhere_are_copied_at_each_call(serving, local, until, device, dtype):
    before = replayed(serving)
    weight, bias = (torch.empty(256, device=device, dtype=each) for each in (torch.float32, dtype))
    for turn in range(CALLS):
        x = torch.empty(16, 256, device=device, dtype=torch.float32)
        if device == "cuda" and turn % 50 == 0:
            torch.cuda._sleep(1_000_000)
        x.normal_()
        # What is made in this mode may not be written outside of it.
        with torch.inference_mode(turn % 3 == 0):
            result = local.layer_norm(x, weight.normal_(), bias.normal_(), eps=1e-5).y
        right = torch.nn.functional.layer_norm(x, (256,), weight, bias.float(), eps=1e-5)
        torch.testing.assert_close(result.clone(), right, rtol=1e-5, atol=1e-5)
    until(lambda: replayed(serving) - before > CALLS // 10)


def test_results_lie_on_their_device_whatever_torch_takes_for_default(local):
    x = local.empty((16, 256), torch.float32, device="cuda")
    for _ in range(5):
        with torch.device("cpu"):
            result = local.layer_norm(x.normal_(), eps=1e-5).y
        assert result.is_cuda
        torch.testing.assert_close(
            result, torch.nn.functional.layer_norm(x, (256,), eps=1e-5), rtol=1e-5, atol=1e-5
        )


def test_several_results_are_kept_apart(local):
    x = local.empty((3, 256), torch.float32, device="cuda")
    expected, kept = [], []
    for _ in range(2 * CALLS):
        kept.append(local.rms_norm(x.normal_()).y)
        expected.append(torch.nn.functional.rms_norm(x, (256,), eps=1e-5))
        if len(kept) == 3:
            for got, right in zip(kept, expected, strict=True):
                torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
            kept.clear()
            expected.clear()


def test_a_module_trains_as_before(serving, local, until):
    """Forward and backward, whose parameters change in place with each step."""
    like = {"device": "cuda", "dtype": torch.float32}
    module, right = remote.LayerNorm(256, client=local, **like), torch.nn.LayerNorm(256, **like)
    for parameter in module.parameters():
        place = local.empty(parameter.shape, torch.float32, device="cuda")
        parameter.data = place.copy_(parameter.data)
    x, dy = (local.empty((16, 256), torch.float32, device="cuda") for _ in range(2))
    before = replayed(serving)
    for _ in range(CALLS):
        x.normal_()
        dy.normal_()
        for each in (module, right):
            each.zero_grad(set_to_none=True)
            each(x).backward(dy)
        for got, expected in zip(module.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                got -= 0.01 * got.grad
                expected -= 0.01 * expected.grad
    until(lambda: replayed(serving) - before > CALLS // 10)


def test_a_layer_that_changes_is_used_at_once(http, local):
    weight = torch.full((256,), 1.0)
    x = local.empty((2, 256), torch.float32, device="cuda").normal_()
    right = torch.nn.functional.rms_norm(x, (256,), eps=1e-5)
    for factor in (1.0, 2.0, 3.0):
        http.put_layer("changing", "rms_norm", weight * factor, eps=1e-5)
        for _ in range(CALLS):
            y = local.rms_norm(x, layer="changing").y
        torch.testing.assert_close(y, right * factor, rtol=1e-5, atol=1e-5)
    http.delete_layer("changing")


def computing(url, ready, mistakes):
    """Call until killed; note wrong results."""
    with Client(url, retries=ONCE) as client:
        x = client.empty((4, 256), torch.float32, device="cuda")
        calls = 0
        while True:
            y = client.layer_norm(x.normal_(), eps=1e-5).y
            if not torch.allclose(y, torch.nn.functional.layer_norm(x, (256,), eps=1e-5), rtol=1e-5, atol=1e-5):
                mistakes.put(calls)
            calls += 1
            if calls == CALLS:
                ready.put(calls)


def test_clients_that_are_killed_harm_nobody(serving, local, path, until):
    context = multiprocessing.get_context("spawn")
    ready, mistakes = context.Queue(), context.Queue()
    processes = [
        context.Process(target=computing, args=(f"unix://{path}", ready, mistakes), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.get(timeout=120)
    x = local.empty((4, 256), torch.float32, device="cuda")
    for process in processes:
        for _ in range(CALLS):
            y = local.layer_norm(x.normal_(), eps=1e-5).y
            torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (256,), eps=1e-5), rtol=1e-5, atol=1e-5)
        process.kill()
        process.join()
    assert mistakes.empty()
    until(lambda: "normserve_inflight_requests 0" in scraped(serving))


@pytest.mark.parametrize("stats", [False, True])
def test_large_tensors_of_the_host_are_copied_in_chunks_by_a_graph(serving, http, local, until, stats):
    weight, bias = torch.rand(1024), torch.rand(1024)
    http.put_layer("chunked", "layer_norm", weight, bias, eps=1e-5)
    x = local.empty((4099, 1024), torch.float32)
    before = replayed(serving)
    for number in range(100):
        x[number::7].normal_()
        result = local.layer_norm(x, layer="chunked", stats=stats or None)
        if number % 9 == 0:
            on_device = x.cuda()
            right = torch.nn.functional.layer_norm(on_device, (1024,), weight.cuda(), bias.cuda(), eps=1e-5)
            torch.testing.assert_close(result.y.cuda(), right, rtol=1e-5, atol=2e-5)
            if stats:
                torch.testing.assert_close(result.mean.cuda(), on_device.mean(1), rtol=1e-4, atol=1e-5)
    until(lambda: replayed(serving) - before > 20)
    http.delete_layer("chunked")
