"""Clients that share memory with a real server: the same answers to the bit as over HTTP, and the same errors."""

import asyncio
import gc
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from normserve.client import (
    AsyncClient,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    OverloadedError,
    RetryPolicy,
    TooLargeError,
    UnauthorizedError,
    UnknownLayerError,
)

ONCE = RetryPolicy(tries=1)
SHAPES = {"layer_norm": (6, 5, 48), "rms_norm": (30, 48), "group_norm": (3, 12, 5, 4)}
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("local") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    return launched("--local", str(path), "--local-bytes", str(2**28))


@pytest.fixture(scope="module")
def http(serving):
    with Client(serving.url) as client:
        yield client


@pytest.fixture(scope="module")
def local(serving, path):
    with Client(f"unix://{path}") as client:
        yield client


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(ours, theirs):
    """Every tensor of two results has the same bits, type and shape."""
    compared = 0
    for name in theirs.__dataclass_fields__:
        expected, got = getattr(theirs, name), getattr(ours, name)
        if name == "timing":
            assert got.stages_ms.keys() == expected.stages_ms.keys()
            assert got.kernel_bytes == expected.kernel_bytes
            assert got.batch_size == expected.batch_size == 1
            assert got.request_id
        elif expected is None:
            assert got is None
        else:
            assert type(got) is type(expected)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(
                torch.as_tensor(got), torch.as_tensor(expected), rtol=0, atol=0, equal_nan=True
            )
            compared += 1
    assert compared


def arguments(op, kind=np.asarray, dtype=torch.float32):
    shape = SHAPES[op]
    size = shape[1] if op == "group_norm" else shape[-1]
    affine = {"weight": kind(random(size, seed=3, dtype=dtype)), "bias": kind(random(size, seed=4, dtype=dtype))}
    if op == "rms_norm":
        del affine["bias"]
    more = {"num_groups": 3} if op == "group_norm" else {}
    return kind(random(*shape, dtype=dtype)), affine, more


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_passes_have_the_same_bits_as_over_http(http, local, op, activation):
    x, affine, more = arguments(op)
    more |= {"residual": np.asarray(random(*x.shape, seed=1)), "activation": activation, "eps": 3e-4}
    forward = [getattr(each, op)(x, **affine, **more, stats=True) for each in (local, http)]
    assert_same(*forward)
    saved = {name: getattr(forward[0], name) for name in ("mean", "rstd")}
    if saved["mean"] is None:
        del saved["mean"]
    dy, arrived = (np.asarray(random(*x.shape, seed=seed)) for seed in (6, 7))
    backward = f"{op}_backward"
    more["dresidual_out"] = arrived
    assert_same(*[getattr(each, backward)(dy, x, **affine, **more, **saved) for each in (local, http)])


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_element_type_of_torch(http, local, op, dtype):
    x, affine, more = arguments(op, torch.as_tensor, dtype)
    more |= {"dropout": 0.3, "seed": -5, "out_dtype": torch.float16}
    assert_same(*[getattr(each, op)(x, **affine, **more) for each in (local, http)])


def test_group_norm_in_channels_last_with_scale_and_shift(http, local):
    x, affine, more = arguments("group_norm")
    x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    more |= {"layout": "nhwc"} | {name: np.asarray(random(3, 12, seed=9)) for name in ("scale", "shift")}
    assert_same(*[each.group_norm(x, **affine, **more) for each in (local, http)])
    assert_same(*[each.group_norm_backward(x, x, **affine, **more) for each in (local, http)])


@pytest.mark.parametrize("rows", [0, 1, 7, 300, 5000])
def test_any_number_of_rows(http, local, rows):
    x = np.asarray(random(rows, 256))
    assert_same(*[each.layer_norm(x, stats=True) for each in (local, http)])
    assert_same(*[each.layer_norm_backward(x, x, np.ones(256, np.float32)) for each in (local, http)])


def test_registered_layers(http, local):
    weight, bias = (np.asarray(random(48, seed=seed)) for seed in (1, 2))
    assert local.put_layer("ln.a", "layer_norm", weight, bias, eps=1e-4, activation="silu") is True
    assert local.put_layer("ln.a", "layer_norm", weight, bias, eps=1e-4, activation="silu") is False
    assert local.layer("ln.a") == http.layer("ln.a")
    assert local.layers() == http.layers()
    x = np.asarray(random(5, 48))
    assert_same(*[each.layer_norm(x, layer="ln.a") for each in (local, http)])
    assert_same(*[each.layer_norm_backward(x, x, layer="ln.a") for each in (local, http)])
    local.put_layer("rms", "rms_norm", weight.astype(np.float16))
    assert_same(*[each.rms_norm_backward(x, x, layer="rms") for each in (local, http)])
    local.put_layer("gn", "group_norm", weight, num_groups=4)
    groups = np.asarray(random(2, 48, 3))
    assert_same(*[each.group_norm(groups, layer="gn", stats=True) for each in (local, http)])
    assert_same(*[each.group_norm_backward(groups, groups, layer="gn") for each in (local, http)])
    for name in ("ln.a", "rms", "gn"):
        local.delete_layer(name)
    with pytest.raises(UnknownLayerError):
        local.layer("ln.a")
    with pytest.raises(UnknownLayerError):
        local.delete_layer("ln.a")
    with pytest.raises(UnknownLayerError):
        local.layer_norm(x, layer="ln.a")


def test_what_the_server_is(http, local, path):
    limits = {"max_bytes": 2**28, "max_connections": 64, "max_device_bytes": 2**30, "own_memory": False}
    assert local.info()["local"] == {"path": str(path), "version": 1, **limits, "device": None}
    assert local.info().keys() == http.info().keys()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda client, x: client.layer_norm(x, eps=-1.0), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, activation="swish"), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, np.ones(3, np.float32)), "invalid_shape"),
        (lambda client, x: client.layer_norm(np.float32(1.0)[None].reshape(())), "invalid_shape"),
        (lambda client, x: client.group_norm(x), "invalid_parameter"),
        (lambda client, x: client.group_norm(x, 5), "invalid_parameter"),
        (lambda client, x: client.layer_norm_backward(x[:1], x), "invalid_shape"),
        (lambda client, x: client.layer_norm_backward(x, x, mean=np.ones(2, np.float32)), "missing_tensor"),
        (lambda client, x: client.layer_norm(x, dropout=0.5), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, layer="a/b"), "invalid_parameter"),
        (lambda client, x: client.put_layer("..", "layer_norm", x), "invalid_parameter"),
        (lambda client, x: client.put_layer("l", "layer_norm", x), "invalid_shape"),
        (lambda client, x: client.put_layer("l", "group_norm", x[0]), "invalid_parameter"),
    ],
)
def test_refusals_are_those_of_http(http, local, call, code):
    x = np.ones((2, 12), np.float32)
    told = []
    for client in (local, http):
        with pytest.raises(InvalidRequestError) as caught:
            call(client, x)
        told.append((caught.value.status, caught.value.code, caught.value.detail))
    assert told[0] == told[1]
    assert told[0][1] == code


def test_a_tensor_in_the_arena_is_not_copied_and_a_result_stays_while_it_is_looked_at(local):
    x = local.empty((300, 1024))
    x[:] = 1.5
    y = local.layer_norm(x, bias=np.full(1024, 7, np.float32)).y
    more = [local.layer_norm(x, bias=np.full(1024, number, np.float32)).y for number in range(3)]
    assert (y == 7).all()
    assert [each[0, 0] for each in more] == [0, 1, 2]
    assert (x == 1.5).all()
    row = y[5]
    del y
    gc.collect()
    local.layer_norm(x)
    assert (row == 7).all()


def test_memory_comes_back_with_the_last_view(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        x = client.empty((2048, 1024))
        x[:] = 1
        # A quota of 256 MiB, and results of 8 MiB.
        for _ in range(40):
            client.layer_norm(x)
        kept = [client.layer_norm(x) for _ in range(15)]
        with pytest.raises(OverloadedError, match="local_bytes"):
            kept += [client.layer_norm(x) for _ in range(20)]
        kept.clear()
        assert client.layer_norm(x).y.shape == x.shape


def test_what_no_quota_allows_is_refused_at_once(local):
    with pytest.raises(TooLargeError):
        local.empty((2**20, 1024))


def test_results_outlive_the_client(serving, path):
    client = Client(f"unix://{path}")
    x = np.full((64, 1024), 2, np.float32)
    y = client.layer_norm(x, bias=np.full(1024, 3, np.float32)).y
    client.close()
    assert (y == 3).all()
    other = Client(f"unix://{path}")
    dropped = other.layer_norm(x, bias=np.full(1024, 4, np.float32)).y
    del other
    gc.collect()
    assert (dropped == 4).all()


def test_a_closed_client_gives_its_memory_back(serving, path, http, until, settled):
    before = settled(lambda: shared_bytes(serving))
    client = Client(f"unix://{path}")
    y = client.layer_norm(np.ones((2**14, 1024), np.float32)).y
    assert shared_bytes(serving) >= before + 2**27
    client.close()
    assert y.shape
    del y
    until(lambda: shared_bytes(serving) == before)


def shared_bytes(serving) -> float:
    import httpx

    text = httpx.get(serving.url + "/metrics", verify=False).text
    (line,) = [line for line in text.splitlines() if line.startswith("normserve_local_bytes ")]
    return float(line.split()[1])


def test_threads_share_a_client(local):
    wrong = []

    def work(number):
        for count in range(40):
            x = np.full((number + 1, 64), number, np.float32)
            y = local.layer_norm(x, bias=np.full(64, number * 100 + count, np.float32)).y
            if not (y == number * 100 + count).all() or y.shape != x.shape:
                wrong.append((number, count))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tasks_share_a_client(serving, path, http):
    async def all_at_once():
        async with AsyncClient(f"unix://{path}") as client:
            x = await client.empty((3, 64), torch.bfloat16)
            x[:] = 1
            biases = [torch.full((64,), float(number)) for number in range(100)]
            results = await asyncio.gather(*[client.layer_norm(x, bias=bias) for bias in biases])
            assert [float(result.y[0, 0]) for result in results] == [float(number) for number in range(100)]
            rows = np.asarray(random(30, 48))
            assert_same(await client.layer_norm(rows, stats=True), http.layer_norm(rows, stats=True))
            with pytest.raises(InvalidRequestError):
                await client.layer_norm(rows, eps=-1.0)
            assert (await client.info())["local"]["path"] == str(path)

    asyncio.run(all_at_once())


def test_a_client_that_another_event_loop_used_connects_again(serving, path):
    x = np.ones((2, 8), np.float32)
    client = AsyncClient(f"unix://{path}", retries=ONCE)
    for _ in range(2):
        assert asyncio.run(client.layer_norm(x)).y.shape == (2, 8)
    asyncio.run(client.close())


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_processes_that_share_neither_processes_nor_ipc(serving, path, until, settled):
    before = settled(lambda: shared_bytes(serving))
    program = (
        "import os, numpy as np; from normserve.client import Client\n"
        f"client = Client('unix://{path}'); x = client.empty((4, 8)); x[:] = 1\n"
        "assert os.getpid() == 1 and (client.layer_norm(x).y == 0).all(); os._exit(0)"
    )
    apart = ["unshare", "--pid", "--ipc", "--fork", sys.executable, "-c", program]
    subprocess.run(apart, check=True, timeout=60)
    # It gave nothing back, and has ended.
    until(lambda: shared_bytes(serving) == before)


def test_torch_is_not_imported_by_who_hands_over_none(serving, path):
    program = (
        "import sys, numpy as np; from normserve.client import Client\n"
        f"client = Client('unix://{path}'); x = client.empty((4, 8)); x[:] = 1\n"
        "assert (client.layer_norm(x).y == 0).all(); client.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def _in_child(path, results):
    results.put(float(CLIENTS[0].layer_norm(np.ones((2, 8), np.float32), bias=np.full(8, 9, np.float32)).y[0, 0]))


CLIENTS: list[Client] = []


def test_a_forked_process_has_a_connection_of_its_own(serving, path):
    with Client(f"unix://{path}") as client:
        y = client.layer_norm(np.ones((2, 8), np.float32), bias=np.full(8, 5, np.float32)).y
        CLIENTS[:] = [client]
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_in_child, args=(path, results))
        child.start()
        assert results.get(timeout=20) == 9
        child.join(20)
        assert (y == 5).all()
        assert client.layer_norm(np.ones((2, 8), np.float32)).y.shape == (2, 8)


def test_no_server_is_one_clear_error(tmp_path):
    with Client(f"unix://{tmp_path}/nobody", retries=ONCE) as client, pytest.raises(ConnectionFailedError):
        client.info()
    with pytest.raises(ValueError, match="unix://PATH"):
        Client("unix://")


def test_keys_are_asked_for(launched, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keyed.sock"
    launched("--local", str(path), env={"NORMSERVE_API_KEY": "secret"})
    x = np.ones((2, 8), np.float32)
    with Client(f"unix://{path}", api_key="secret") as client:
        assert client.layer_norm(x).y.shape == (2, 8)
    for key in (None, "wrong"):
        with Client(f"unix://{path}", api_key=key) as client, pytest.raises(UnauthorizedError) as caught:
            client.layer_norm(x)
        assert "secret" not in str(caught.value)


def test_the_program_of_the_sidecar_example_computes(serving, path):
    file = Path(__file__).parents[3] / "docker/k8s/sidecar/client.py"
    environment = os.environ | {"NORMALISE_AT": f"unix://{path}"}
    program = subprocess.Popen([sys.executable, file], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert re.fullmatch(r"[0-9.]+ GB/s, deviation 1\.000\n", program.stdout.readline())
        program.terminate()
        assert program.wait(10) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_the_access_log_has_a_line_for_each_message(launched, tmp_path, until):
    path = tmp_path / "n.sock"
    server = launched("--local", str(path), "--access-log", "--log-format", "json")
    x = np.ones((2, 8), np.float32)
    with Client(f"unix://{path}") as client:
        client.layer_norm(x)
        with pytest.raises(InvalidRequestError):
            client.rms_norm(x, weight=np.ones(3, np.float32))

    def noted():
        said = [json.loads(line) for line in server.lines if '"normserve.access"' in line]
        return [each for each in said if each.get("method") == "local"]

    until(lambda: len(noted()) == 4)
    found = {each["path"]: each for each in noted()}
    assert found.keys() == {"hello", "grow", "layer_norm/forward", "rms_norm/forward"}
    assert (found["layer_norm/forward"]["status"], found["rms_norm/forward"]["status"]) == (200, 422)
    computed = found["layer_norm/forward"]
    assert (computed["received_bytes"], computed["address"]) == (x.nbytes, f"uid {os.getuid()}")
