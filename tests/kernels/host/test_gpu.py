"""The host extension on a GPU: the bits of Python's way, on any stream, in a graph, in other threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import fusednorm
import pytest
import torch
from fusednorm.launch import extension_calls, replay_cache
from fusednorm.launch.extension_calls import load_extension

from tests.kernels.harness.on_gpu import on_streams_of_their_own, watched

pytestmark = pytest.mark.gpu


@pytest.fixture
def extension(host_extension):
    """The extension in use, whatever was before."""
    before = replay_cache.get_extension()
    replay_cache.set_extension(load_extension(replay_cache.MAX_KINDS))
    yield replay_cache.get_extension()
    replay_cache.clear_replays()
    replay_cache.set_extension(before)


class Model:
    """A norm's module, its operands, and what a step of it gives."""

    def __init__(self, kind, shape, dtype, device, activation="silu", last=False, modulated=False):
        size = shape[1] if len(shape) == 4 else shape[-1]
        groups = (32,) if kind is fusednorm.GroupNorm else ()
        self.module = kind(*groups, size, activation=activation, device=device, dtype=dtype)
        self.x, self.dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        if last:
            self.x, self.dy = (t.to(memory_format=torch.channels_last) for t in (self.x, self.dy))
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_()
        self.x.requires_grad_()
        modulations = torch.randn(2, shape[0], size, device=device) if modulated else ()
        self.modulations = [each.to(dtype).requires_grad_() for each in modulations]

    def __call__(self):
        return self.module(self.x, *self.modulations)

    @property
    def leaves(self):
        return self.x, *self.module.parameters(), *self.modulations

    def step(self):
        """y and the gradients of x, of the parameters, and of each sample's scale and shift."""
        y = self()
        return y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)


OVER_CHANNELS = partial(fusednorm.LayerNorm, layout="nchw")
# One program a row, rows that programs share, both layouts of samples, groups that programs share, channels.
MODELS = {
    "rows": (fusednorm.LayerNorm, (16, 4096)),
    "short rows": (fusednorm.RMSNorm, (2, 33, 64)),
    "shared rows": (fusednorm.LayerNorm, (3, 40000)),
    "very long rows": (fusednorm.RMSNorm, (1, 600000)),
    "groups": (fusednorm.GroupNorm, (2, 1280, 16, 16)),
    "shared groups": (fusednorm.GroupNorm, (2, 320, 64, 64)),
    "channels last": (fusednorm.GroupNorm, (2, 640, 32, 32), "last"),
    "streamed": (fusednorm.GroupNorm, (4, 512, 14, 14), "last"),
    "over channels": (OVER_CHANNELS, (4, 96, 28, 28)),
    "over channels last": (OVER_CHANNELS, (4, 96, 28, 28), "last"),
    "over channels of samples": (OVER_CHANNELS, (3, 768, 7, 7), "modulated"),
    "over channels that are read twice": (OVER_CHANNELS, (2, 2500, 14, 14), "modulated"),
    "rows of samples": (fusednorm.LayerNorm, (4, 77, 1152), "modulated"),
    "groups of samples": (fusednorm.GroupNorm, (2, 1280, 16, 16), "modulated"),
}


def model(name, device, dtype=torch.bfloat16):
    kind, shape, *options = MODELS[name]
    return Model(kind, shape, dtype, device, **dict.fromkeys(options, True))


def assert_same(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert torch.equal(result, other)
        assert result.stride() == other.stride()


def learnt(made):
    """A step by Python; afterwards the extension makes it."""
    wanted = made.step()
    for _ in range(2):
        made.step()
    assert made().grad_fn.name() == "FusedNormBackward"
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_steps_give_the_bits_of_the_first(name, dtype, extension, device, poisoned, monkeypatch):
    made = model(name, device, dtype)
    wanted = learnt(made)
    monkeypatch.setattr(extension_calls, "_gradient_function", None)
    for _ in range(3):
        assert_same(made.step(), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_steps_on_streams_of_their_own(name, extension, device):
    models = [model(name, device) for _ in range(2)]
    wanted = [learnt(made) for made in models]
    for results in on_streams_of_their_own([made.step for made in models], device):
        for result, other in zip(results, wanted, strict=True):
            assert_same(result, other)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_captured_into_a_graph(name, extension, device):
    made = model(name, device)
    learnt(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.step()
    for _ in range(3):
        with torch.no_grad():
            made.x.copy_(torch.randn_like(made.x))
        graph.replay()
        assert_same(captured, made.step())


def test_threads_share_what_is_known(extension, device):
    models = [model(name, device) for name in MODELS]
    wanted = [learnt(made) for made in models]

    def work(_):
        for made, results in zip(models, wanted, strict=True):
            assert_same(made.step(), results)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))


def test_hooks_see_forward_launches(extension, device):
    made = model("rows", device)
    learnt(made)
    with watched() as seen, torch.no_grad():
        made()
    assert len(seen) == 1


def test_rows_of_any_number_are_known_after_the_first(extension, device):
    made = model("rows", device)
    learnt(made)
    for rows in (1, 7, 1000, 4097):
        made.x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
        made.dy = torch.randn_like(made.x)
        known = extension.count_replays()
        results = made.step()
        assert made().grad_fn.name() == "FusedNormBackward"
        assert extension.count_replays() == known
        replay_cache.clear_replays()
        assert_same(made.step(), results)
        learnt(made)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_is_computed_where_it_is(name, extension):
    models = [model(name, torch.device("cuda", index)) for index in range(2)]
    wanted = [learnt(made) for made in models]
    for _ in range(3):
        for made, results in zip(models, wanted, strict=True):
            assert_same(made.step(), results)


@pytest.fixture
def looks(host_extension, monkeypatch):
    """What there is to be found by a process that does without the extension so far."""
    before, found = replay_cache.get_extension(), []
    replay_cache.set_extension(None)
    replay_cache.clear_replays()
    monkeypatch.setattr(replay_cache, "_LOOK_EVERY", 4)
    yield found
    replay_cache.clear_replays()
    replay_cache.set_extension(before)


@pytest.mark.parametrize("name", MODELS)
def test_a_process_goes_on_with_the_extension_once_it_is_there(name, looks, device, poisoned, monkeypatch):
    monkeypatch.setattr(replay_cache, "_load", lambda may_build: looks[0] if looks else None)
    made = model(name, device)
    wanted = made.step()
    for _ in range(5):
        assert_same(made.step(), wanted)
    y = made()
    assert y.grad_fn.name() != "FusedNormBackward"
    looks.append(load_extension(replay_cache.MAX_KINDS))
    assert looks[0] is not None
    for _ in range(10):
        assert_same(made.step(), wanted)
    assert made().grad_fn.name() == "FusedNormBackward"
    assert_same(torch.autograd.grad(y, made.leaves, made.dy), wanted[1:])


def test_nothing_is_looked_for_while_a_graph_is_captured(looks, device, monkeypatch):
    monkeypatch.setattr(replay_cache, "_load", looks.append)
    made = model("rows", device)
    for _ in range(3):
        made.step()
    torch.cuda.synchronize()
    looks.clear()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for _ in range(10):
            made.step()
    assert not looks
    for _ in range(10):
        made.step()
    assert True in looks


_LAUNCHERS_ALONE = """
import sys, torch, fusednorm
from fusednorm.launch.replay_cache import get_extension
x = torch.randn(4, 64, device="cuda")
for _ in range(2):
    fusednorm.layer_norm_forward(x)
extension = get_extension()
known = extension.count_replays()
# Its module is imported only now.
assert "fusednorm.api.group_norm" not in sys.modules
y = torch.randn(2, 8, 16, device="cuda")
first, second = (fusednorm.group_norm_forward(y, 4).y for _ in range(2))
assert torch.equal(first, second)
assert extension.count_replays() > known
assert "fusednorm.api.autograd" not in sys.modules
print(extension)
"""


def test_a_process_that_calls_launchers_alone_has_the_extension(host_extension):
    command = [sys.executable, "-c", _LAUNCHERS_ALONE]
    assert "fusednorm_host" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
