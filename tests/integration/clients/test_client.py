"""Both clients against a real server: operations and gradients compared with torch's own in float64."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normload.adapters.native import NativeAdapter
from normload.clients.prepared_requests import prepare_request
from normload.clients.request_sender import RequestSender
from normload.clients.response_checker import ResponseChecker
from normload.load.scenarios import LoadPhase
from normload.load.schedules import ArrivalGenerator, ClosedLoopSchedule
from normload.load.workload import Workload
from normserve.client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    RetryPolicy,
    TooLargeError,
    UnauthorizedError,
    UnknownLayerError,
)
from normserve.client.http.server_address import ServerAddress

CASES = {
    "layer_norm": ((5, 7, 33), 33, {}, lambda h, w, b: F.layer_norm(h, (33,), w, b, 1e-5)),
    "rms_norm": ((5, 33), 33, {}, lambda h, w, b: F.rms_norm(h, (33,), w, 1e-6)),
    "group_norm": ((2, 6, 4, 5), 6, {"num_groups": 3}, lambda h, w, b: F.group_norm(h, 3, w, b, 1e-5)),
}


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_operation_and_its_gradients_are_torchs(client, op, kind):
    shape, size, params, formula = CASES[op]
    x, residual, dy = (random(*shape, seed=seed) for seed in range(3))
    affine = {"weight": random(size, seed=3), "bias": random(size, seed=4)}
    if op == "rms_norm":
        del affine["bias"]
    leaves = {name: t.double().requires_grad_() for name, t in {"x": x, **affine}.items()}
    y = F.silu(formula(leaves["x"] + residual.double(), leaves["weight"], leaves.get("bias")))
    y.backward(dy.double())

    as_kind = torch.as_tensor if kind == "torch" else np.asarray
    given = {name: as_kind(t) for name, t in affine.items()}
    common = params | {"residual": as_kind(residual), "activation": "silu"}
    forward = getattr(client, op)(as_kind(x), **given, **common, stats=True)
    saved = {name: getattr(forward, name) for name in ("mean", "rstd") if getattr(forward, name) is not None}
    backward = getattr(client, op + "_backward")(as_kind(dy), as_kind(x), **given, **common, **saved)

    assert isinstance(forward.y, torch.Tensor if kind == "torch" else np.ndarray)
    assert_close(forward.y, y)
    assert_close(forward.residual_out, x + residual)
    for name, leaf in leaves.items():
        assert_close(getattr(backward, "d" + name), leaf.grad)


def assert_close(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual).double(), expected.detach().double(), rtol=1e-4, atol=1e-4)


def test_the_answer_says_how_it_was_served(client):
    timing = client.rms_norm(np.ones((4, 8), np.float32)).timing
    assert list(timing.stages_ms) == ["recv", "queue", "copy_in", "kernel", "copy_out"]
    assert timing.kernel_bytes == 2 * 4 * 8 * 4
    assert timing.kernel_bandwidth > 0
    assert timing.batch_size == 1
    assert timing.request_id


def test_every_element_type_and_an_empty_tensor(client):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert client.layer_norm(random(3, 8).to(dtype)).y.dtype == dtype
        assert client.layer_norm(random(3, 8), out_dtype=dtype).y.dtype == dtype
        assert client.layer_norm(torch.empty(0, 8, dtype=dtype)).y.shape == (0, 8)


def test_a_layer_lives_until_it_is_deleted(client):
    weight = random(8).numpy()
    assert client.put_layer("test.client", "rms_norm", weight, eps=1e-3)
    try:
        assert not client.put_layer("test.client", "rms_norm", weight, eps=1e-2, activation="relu")
        assert client.layer("test.client")["eps"] == 1e-2
        assert "test.client" in [layer["name"] for layer in client.layers()]
        x = random(4, 8).numpy()
        np.testing.assert_array_equal(
            client.rms_norm(x, layer="test.client").y,
            client.rms_norm(x, weight, eps=1e-2, activation="relu").y,
        )
    finally:
        client.delete_layer("test.client")
    with pytest.raises(UnknownLayerError):
        client.layer("test.client")


def test_an_error_carries_the_servers_words(client):
    with pytest.raises(InvalidRequestError, match="activation") as caught:
        client.layer_norm(np.ones((2, 2), np.float32), activation="gleu")
    assert caught.value.code == "invalid_parameter"
    assert caught.value.request_id


def test_a_refusal_before_the_body_is_read_reaches_the_sender(start_server):
    server = start_server("--max-body-bytes", "1000000", "--api-key", "right")
    x = np.zeros((4096, 4096), np.float32)
    with Client(server.url, api_key="right", retries=RetryPolicy(tries=1)) as client:
        with pytest.raises(TooLargeError):
            client.layer_norm(x)
        assert client.layer_norm(x[:4]).y.shape == (4, 4096)
    with Client(server.url, api_key="wrong", retries=RetryPolicy(tries=1)) as client:  # noqa: SIM117
        with pytest.raises(UnauthorizedError):
            client.layer_norm(x)


@pytest.fixture(scope="module")
def at_a_socket(launched, tmp_path_factory):
    """The URL of a server's Unix domain socket."""
    path = tmp_path_factory.mktemp("uds") / "normserve.sock"
    launched("--uds", str(path))
    return f"http+unix://{path}"


def test_a_socket_in_the_file_system_answers_as_a_port_does(client, at_a_socket):
    x, large = random(3, 8).numpy(), random(2048, 2048).numpy()

    async def main():
        async with AsyncClient(at_a_socket) as other:
            return await other.layer_norm(x), await other.layer_norm(large)

    with Client(at_a_socket) as other:
        results = [other.layer_norm(x), other.layer_norm(large), *asyncio.run(main())]
    for result, given in zip(results, (x, large, x, large), strict=True):
        np.testing.assert_array_equal(result.y, client.layer_norm(given).y)


def test_the_load_test_asks_at_a_socket(at_a_socket):
    phase = LoadPhase("a", "closed", 0.2, connections=4)
    address = ServerAddress.parse_url(at_a_socket)
    drawn = Workload(max_bytes=2**12, pool=5).draw_cases(0)
    pool = [prepare_request(case, NativeAdapter(), address, None) for case, _ in drawn]
    sender = RequestSender(
        address, pool, ResponseChecker(NativeAdapter(), pool), check_share=1.0, seed=0, timeout_s=20.0
    )
    assert {(record.code, record.fault) for record in sender.send_and_check_each_once()} == {("ok", None)}
    start = time.perf_counter()
    sender.send_segment(
        ClosedLoopSchedule(phase, start, ArrivalGenerator((0,), [1.0] * 5)), 4, [start], lambda: None
    )
    records = [record for _, record in sender.take_records()]
    assert len(records) > 4
    assert {(record.code, record.checked, record.fault) for record in records} == {("ok", True, None)}
    sender.close()


def test_threads_share_a_client(server):
    given = [random(5, 16, seed=seed) for seed in range(8)]
    with Client(server.url, max_connections=3) as client, ThreadPoolExecutor(8) as threads:
        for x, result in zip(given * 5, threads.map(client.layer_norm, given * 5), strict=True):
            assert_close(result.y, F.layer_norm(x.double(), (16,)))


def test_many_requests_of_one_asynchronous_client(server):
    async def main():
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.layer_norm(random(3, 16, seed=i)) for i in range(40)))

    for i, result in enumerate(asyncio.run(main())):
        assert_close(result.y, F.layer_norm(random(3, 16, seed=i).double(), (16,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm", "group_norm nhwc"])
def test_the_client_expects_what_the_server_answers(client, op, dtype):
    name, _, layout = op.partition(" ")
    x, size = random(2, 6, 5, 4).to(dtype), {"group_norm": 6}.get(op, 4)
    of_x = {"layout": layout, "num_groups": 2} if layout else {"num_groups": 3} if name == "group_norm" else {}
    forward, backward = getattr(client, name), getattr(client, f"{name}_backward")
    given = {"weight": torch.ones(size, dtype=torch.float16)}
    if name != "rms_norm":
        given["bias"] = torch.ones(size)
    samples = {key: torch.ones(2, size) for key in ("scale", "shift")} if name == "group_norm" else {}
    for use in ({}, given, *({key: value} for key, value in samples.items())):
        if name != "rms_norm" or "bias" not in use:
            saved = forward(x, **use, **of_x, stats=True, residual=x, out_dtype=torch.float16)
            assert (saved.y.dtype, saved.residual_out.dtype, saved.rstd.dtype) == (
                torch.float16,
                dtype,
                torch.float32,
            )
            backward(x, x, **use, **of_x, residual=x)
    client.put_layer("expected", name, **given, **{key: of_x[key] for key in of_x if key == "num_groups"})
    of_layer = {"layer": "expected"} | {key: of_x[key] for key in of_x if key == "layout"}
    assert forward(x, **of_layer, stats=True).rstd.shape[-1] in (2, 3, 5)
    gradients = backward(x, x, **of_layer)
    assert gradients.dweight.dtype == torch.float16
    assert (gradients.dbias is None) == (name == "rms_norm")
    client.delete_layer("expected")
