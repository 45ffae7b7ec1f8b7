"""Clients that keep tensors in the memory of the server's GPU; needs a GPU."""

import asyncio
import gc
import re
import signal
import subprocess
import sys
import textwrap

import httpx
import numpy as np
import pytest
import torch
from normserve.client import AsyncClient, Client, OverloadedError, RetryPolicy, TooLargeError
from normserve.client import torch as remote
from normserve.codec import local_frames as frames
from normserve.memory.device_segments import Device, DeviceSegment
from torch import nn

from tests.integration.local_wire import LocalConnection

pytestmark = pytest.mark.gpu

# A cold start compiles every kernel that the configuration foresees.
START_S = 300
ONCE = RetryPolicy(tries=1)
MIB = 2**20
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {
    "layer_norm": {},
    "rms_norm": {},
    "group_norm": {"num_groups": 4},
    "group_norm nhwc": {"num_groups": 4, "layout": "nhwc"},
}


REST = [(name, torch.bfloat16) for name in OPTIONS if name != "layer_norm"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("device") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    options = ("--local", str(path), "--local-device-bytes", str(512 * MIB), "--max-compiles-per-minute", "600")
    server = launched("--backend", "triton", *options, wait=False)
    server.wait_until_ready(START_S)
    return server


@pytest.fixture(scope="module")
def http(serving):
    with Client(serving.url, retries=ONCE) as client:
        yield client


@pytest.fixture
def local(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        yield client


def metric(serving, name: str, label: str = "") -> float:
    """The sum of a metric's series, of those that have this label if one is given."""
    text = httpx.get(serving.url + "/metrics").text
    lines = [line for line in text.splitlines() if re.match(rf"normserve_{name}[ {{]", line) and label in line]
    return sum(float(line.split()[-1]) for line in lines)


def random(*shape, seed=0, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype)


def assert_same(got, right):
    for name in right.__slots__:
        expected, found = getattr(right, name), getattr(got, name)
        if name != "timing":
            assert (found is None) == (expected is None), name
            if expected is not None:
                assert found.device == expected.device, name
                assert torch.equal(found, expected), name


def tensors_for(name, dtype, *, backward=False):
    group = name.startswith("group")
    shape = (3, 5, 6, 16) if name.endswith("nhwc") else (3, 16, 5, 6) if group else (37, 1024)
    size = 16 if group else 1024
    tensors = {"x": random(*shape, dtype=dtype), "residual": random(*shape, seed=1, dtype=dtype)}
    tensors["weight"] = random(size, seed=2)
    if name != "rms_norm":
        tensors["bias"] = random(size, seed=3, dtype=dtype)
    if group:
        tensors |= {"scale": random(3, size, seed=4), "shift": random(3, size, seed=5, dtype=dtype)}
    if backward:
        tensors |= {"dy": random(*shape, seed=6, dtype=dtype), "dresidual_out": random(*shape, seed=7, dtype=dtype)}
    return tensors


@pytest.mark.parametrize(("name", "dtype"), [("layer_norm", each) for each in DTYPES] + REST)
def test_results_are_those_of_http_to_the_bit(serving, http, local, until, name, dtype):
    op = name.split(maxsplit=1)[0]
    before = metric(serving, "requests_total", 'transport="local_cuda"')
    for options in (
        {},
        {"stats": True, "activation": "silu"},
        {"dropout": 0.25, "seed": 7, "out_dtype": "float16"},
    ):
        given = tensors_for(name, dtype)
        assert_same(
            getattr(local, op)(**given, **OPTIONS[name], **options),
            getattr(http, op)(**given, **OPTIONS[name], **options),
        )
    given = tensors_for(name, dtype, backward=True)
    assert_same(
        getattr(local, f"{op}_backward")(**given, **OPTIONS[name]),
        getattr(http, f"{op}_backward")(**given, **OPTIONS[name]),
    )
    until(lambda: metric(serving, "requests_total", 'transport="local_cuda"') == before + 4)


def test_a_residual_of_another_type_and_no_rows_at_all(http, local):
    x, residual = random(5, 64, dtype=torch.bfloat16), random(5, 64)
    assert_same(local.layer_norm(x, residual=residual), http.layer_norm(x, residual=residual))
    empty = torch.empty(0, 64, device="cuda")
    assert local.layer_norm(empty).y.shape == (0, 64)
    weight = random(64)
    gradients = local.layer_norm_backward(empty, empty, weight)
    assert gradients.dx.shape == (0, 64)
    assert torch.equal(gradients.dweight, torch.zeros_like(weight))


def test_registered_layers(http, local):
    weight, bias = random(256), random(256, seed=1)
    http.put_layer("on-device", "layer_norm", weight, bias, eps=1e-3)
    x = random(9, 256)
    assert_same(local.layer_norm(x, layer="on-device"), http.layer_norm(x, layer="on-device"))
    got = local.layer_norm_backward(x, x, layer="on-device")
    assert_same(got, http.layer_norm_backward(x, x, layer="on-device"))


def test_nothing_is_copied_of_what_lies_there(serving, local):
    x = local.empty((512, 1024), torch.float32, device="cuda")
    x.normal_()
    weight = local.empty((1024,), device="cuda").fill_(2)
    arena = local._transport._link._offers._arena
    copied = [metric(serving, "transfer_bytes_total", f'direction="{way}"') for way in ("in", "out")]
    taken = arena._taken
    y = local.layer_norm(x, weight).y
    assert arena._taken == taken + 1
    assert arena.locate_tensor(y) is not None
    torch.testing.assert_close(y, 2 * nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)
    assert [metric(serving, "transfer_bytes_total", f'direction="{way}"') for way in ("in", "out")] == copied
    again = local.layer_norm(y).y
    torch.testing.assert_close(again, nn.functional.layer_norm(y, (1024,)), rtol=1e-5, atol=1e-5)
    del y, again
    gc.collect()
    assert arena._find(1) is not None


@pytest.mark.parametrize("rows", [1, 2048])
def test_what_comes_often_is_replayed_on_what_lies_there_then(http, local, rows):
    x, dy = (local.empty((rows, 1024), torch.float32, device="cuda") for _ in range(2))
    weight = local.empty((1024,), device="cuda")
    # Until a call is captured it takes two hundred of each place of its results.
    for number in range(7):
        for tensor in (x, dy, weight):
            tensor.copy_(random(*tensor.shape, seed=number))
        for _ in range(100):
            y = local.layer_norm(x, weight).y
            gradients = local.layer_norm_backward(dy, x, weight)
        assert torch.equal(y, http.layer_norm(x, weight).y)
        assert_same(gradients, http.layer_norm_backward(dy, x, weight))


def test_a_view_with_strides_is_copied_once(http, local):
    x = random(64, 2, 512)[:, 1]
    assert not x.is_contiguous()
    assert_same(local.layer_norm(x), http.layer_norm(x.contiguous()))


def test_tensors_of_the_host_go_along(http, local):
    x, weight = random(8, 128), torch.full((128,), 3.0)
    assert_same(local.layer_norm(x, weight), http.layer_norm(x, weight.cuda()))
    gradients = local.layer_norm_backward(x, x, weight)
    assert gradients.dx.is_cuda
    assert not gradients.dweight.is_cuda
    on_host = local.layer_norm(x.cpu(), weight.cuda())
    assert not on_host.y.is_cuda


def test_what_the_stream_still_writes_is_waited_for(local):
    x = local.empty((256, 1024), device="cuda").zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    x.copy_(torch.arange(1024.0, device="cuda").expand(256, 1024))
    y = local.layer_norm(x).y
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)


def test_a_place_is_not_used_again_while_a_stream_reads_it(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        ones = torch.ones(256, 1024, device="cuda")
        kept = torch.empty(256, 1024, device="cuda")
        side = torch.cuda.Stream()
        bias = torch.full((1024,), 7.0, device="cuda")
        y = client.layer_norm(ones, bias=bias).y
        address = y.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            kept.copy_(y)
            # Its last view dies where it is read.
            del y
        others = [client.layer_norm(ones, bias=torch.full((1024,), 9.0, device="cuda")).y for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        arena = client._transport._link._offers._arena
        assert side.cuda_stream in [stream.cuda_stream for _, stream in arena._dying]
        torch.cuda.synchronize()
        assert (kept == 7).all()
        client.layer_norm(ones)
        assert side.cuda_stream not in [stream.cuda_stream for _, stream in arena._dying]


def test_the_asynchronous_client(serving, path, http):
    async def ask():
        async with AsyncClient(f"unix://{path}", retries=ONCE) as client:
            x = await client.empty((33, 256), torch.bfloat16, device="cuda")
            x.normal_()
            torch.cuda._sleep(50_000_000)
            results = await asyncio.gather(*[client.layer_norm(x, eps=1e-5 * (1 + n)) for n in range(20)])
            for number, result in enumerate(results):
                assert_same(result, http.layer_norm(x, eps=1e-5 * (1 + number)))

    asyncio.run(ask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_train(local, dtype):
    import fusednorm

    def model(kinds):
        layer, rms, group = kinds
        torch.manual_seed(3)
        mixed = (nn.Unflatten(1, (16, 4)), group, nn.Flatten())
        layers = (nn.Linear(32, 64), layer, nn.Linear(64, 64), rms, *mixed, nn.Linear(64, 8))
        return nn.Sequential(*layers).to("cuda", dtype)

    made = {"device": "cuda", "dtype": dtype}
    ours = model(
        (
            remote.LayerNorm(64, client=local, **made),
            remote.RMSNorm(64, client=local, **made),
            remote.GroupNorm(4, 16, client=local, **made),
        )
    )
    rows = (fusednorm.LayerNorm(64, **made), fusednorm.RMSNorm(64, **made))
    theirs = model((*rows, fusednorm.GroupNorm(4, 16, **made)))
    theirs.load_state_dict(ours.state_dict())
    losses = []
    for each in (ours, theirs):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for step in range(20):
            x = random(64, 32, seed=step, dtype=dtype)
            optimizer.zero_grad()
            loss = (each(x) - x[:, :8].tanh()).float().square().mean()
            loss.backward()
            assert all(parameter.grad.is_cuda for parameter in each.parameters())
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4 if dtype is torch.float32 else 5e-2)


CLIENT = """
    import sys, torch
    from normserve.client import Client
    client = Client("unix://" + sys.argv[1])
    x = client.empty((4096, 1024), device="cuda").fill_(3)
    client.layer_norm(x)
    print("ready", flush=True)
    while True:
        client.layer_norm(x)
"""


def test_a_client_that_is_killed_leaves_nothing_behind(serving, path, local, until, settled):
    x = random(64, 1024)
    right = local.layer_norm(x).y.clone()
    gc.collect()
    before = settled(lambda: metric(serving, "local_device_bytes"))
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            assert metric(serving, "local_device_bytes") > before
            for _ in range(50):
                assert torch.equal(local.layer_norm(x).y, right)
            client.send_signal(signal.SIGKILL)
        until(lambda: metric(serving, "local_device_bytes") == before)
        assert torch.equal(local.layer_norm(x).y, right)


def test_memory_that_is_had_again_is_cleared_and_charged_once(serving, path, until):
    charged = []
    for _ in range(6):
        client = Client(f"unix://{path}", retries=ONCE)
        made = client.empty((100, MIB // 4), device="cuda")
        assert not made.any()
        made.fill_(5)
        charged.append(metric(serving, "local_device_bytes"))
        del made
        client.close()
    # Closed or not, it is charged until the process ends.
    assert len(set(charged)) == 1
    assert metric(serving, "local_device_bytes") == charged[0]


def test_the_quota(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        with pytest.raises(TooLargeError, match="local_device_bytes"):
            client.empty((513, MIB // 4), device="cuda")
        with pytest.raises(OverloadedError, match="local_device_bytes"):
            held = [client.empty((64, MIB // 4), device="cuda") for _ in range(9)]
        held = client.empty((64, MIB // 4), device="cuda")
        assert held.nbytes == 64 * MIB


def test_results_outlive_the_server(start_server, tmp_path):
    path = tmp_path / "own.sock"
    server = start_server("--backend", "triton", "--local", str(path), wait=False)
    server.wait_until_ready(START_S)
    client = Client(f"unix://{path}", retries=ONCE)
    y = client.layer_norm(torch.ones(64, 1024, device="cuda"), bias=torch.full((1024,), 3.0, device="cuda")).y
    server.stop()
    assert (y == 3).all()
    client.close()
    assert (y + 1 == 4).all()


class Wire(LocalConnection):
    """With segments of the device's memory."""

    def grow_device(self, nbytes: int = MIB):
        answer = self.ask(frames.Grow(nbytes, "device"))
        assert answer.status == 200, answer
        mapped = Device.find(answer.device).open(self._descriptors.pop(), answer.nbytes, DeviceSegment)
        return answer.segment, torch.as_tensor(mapped.whole(), device="cuda").view(torch.float32)


@pytest.fixture
def wire(serving, path):
    with Wire(path) as wire:
        yield wire


def forward(segment, *, x=0, y=4096, of_y=None, shape=(4, 256)):
    return frames.Compute(
        op="layer_norm",
        tensors={"x": frames.Located(segment, x, "float32", shape)},
        results={"y": frames.Place(segment if of_y is None else of_y, y, 4096)},
    )


def test_y_over_x_and_beside_it(wire):
    number, memory = wire.grow_device()
    rows = random(4, 256)
    right = nn.functional.layer_norm(rows, (256,))
    for y in (4096, 0):
        memory[:1024] = rows.flatten()
        torch.cuda.synchronize()
        assert wire.ask(forward(number, y=y)).status == 200
        torch.testing.assert_close(memory[y // 4 :][:1024].view(4, 256), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": -4080}, "end within its segment"),
        ({"y": -4080}, "end within its segment"),
        ({"x": 2**62}, "end within its segment"),
        ({"x": 8}, "multiple of 16"),
        ({"y": 4080}, "overlap"),
        ({"y": 2**63 - 16}, "end within its segment"),
        ({"shape": (2**40, 2**22)}, ""),
    ],
)
def test_references_that_lie(wire, changes, text):
    number, memory = wire.grow_device()
    # From the segment's end.
    changes = {name: memory.nbytes + at if name != "shape" and at < 0 else at for name, at in changes.items()}
    answer = wire.ask(forward(number, **changes))
    assert 400 <= answer.status < 500
    assert text in answer.problem["detail"]
    assert wire.ask(forward(number)).status == 200


def test_memories_do_not_mix_and_segments_are_a_connections_own(wire, path):
    number, _ = wire.grow_device()
    of_host = wire.ask(frames.Grow(MIB)).segment
    assert "all in the device's" in wire.ask(forward(number, of_y=of_host)).problem["detail"]
    assert wire.ask(forward(number)).status == 200
    with Wire(path) as other:
        assert other.ask(forward(number)).status == 422


def test_a_segment_that_is_given_back_is_of_no_use(wire):
    number, _ = wire.grow_device()
    wire.send(frames.Free(number))
    assert wire.ask(forward(number)).status == 422
    again, memory = wire.grow_device()
    assert again != number
    assert not memory.any()
