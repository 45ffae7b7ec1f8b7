"""Calls over channels, and with a scale, shift and gate, captured into CUDA graphs and compiled by Inductor."""

import fusednorm
import pytest
import torch
from triton import knobs

pytestmark = [
    pytest.mark.gpu,
    # Inductor warns of settings and of parts of torch.
    pytest.mark.filterwarnings("ignore"),
]


def over_channels(x, residual, six):
    """A call over channels that some other work surrounds."""
    weight, bias = six[0].chunk(6)[:2]
    return x + fusednorm.layer_norm(x * 2, weight, bias, activation="gelu", layout="nchw") * residual


def over_channels_of_samples(x, residual, six):
    shift, scale, gate = six.chunk(6, -1)[:3]
    y, h = fusednorm.add_rms_norm(x * 2, residual, scale=scale, shift=shift, gate=gate, layout="nchw")
    return y * 3 + h


def adaptive_rows(x, residual, six):
    shift, scale, gate = six.chunk(6, -1)[:3]
    y, h = fusednorm.add_layer_norm(x * 2, residual, scale=scale, shift=shift, gate=gate)
    return y * 3 + h


def instances(x, residual, six):
    weight, bias = six[0].chunk(6)[:2]
    y = fusednorm.instance_norm(x * 2, weight, bias, activation="leaky_relu", negative_slope=0.25)
    return x + y * residual


SAMPLES, TOKENS, FEW_POSITIONS, MANY_CHANNELS = (4, 96, 28, 28), (4, 64, 1152), (4, 768, 7, 7), (2, 2100, 6, 6)
CALLS = {
    "channels": (over_channels, SAMPLES),
    "channels of few positions": (over_channels, FEW_POSITIONS),
    "channels that are read twice": (over_channels, MANY_CHANNELS),
    "channels last": (over_channels, SAMPLES, torch.channels_last),
    "channels of samples": (over_channels_of_samples, SAMPLES),
    "channels of samples that are read twice": (over_channels_of_samples, MANY_CHANNELS),
    "channels of samples last": (over_channels_of_samples, SAMPLES, torch.channels_last),
    "adaptive rows": (adaptive_rows, TOKENS),
    "instances": (instances, SAMPLES),
    "instances last": (instances, SAMPLES, torch.channels_last),
}


def make_leaves(name, device):
    """x, a residual, and six parameters of each sample in one tensor."""
    _, shape, *formats = CALLS[name]
    channels = shape[-1] if len(shape) == 3 else shape[1]
    x, residual = torch.randn(2, *shape, device=device).unbind()
    if formats:
        x, residual = (each.contiguous(memory_format=formats[0]) for each in (x, residual))
    return [
        each.clone().requires_grad_() for each in (x, residual, torch.randn(shape[0], 6 * channels, device=device))
    ]


def run_step(call, leaves, dy):
    y = call(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_gives_the_bits_of_the_call(name, device):
    call, leaves = CALLS[name][0], make_leaves(name, device)
    dy = torch.randn_like(leaves[0])
    run_step(call, leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_step(call, leaves, dy)
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for result, right in zip(captured, run_step(call, leaves, dy), strict=True):
            assert torch.equal(result, right)
            assert result.stride() == right.stride()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", CALLS)
def test_inductor_compiles_the_call_whole(name, mode, device, monkeypatch):
    from torch._inductor import config

    # Inductor moves Triton's cache otherwise, and starts a pool of compilers in each process of tests.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(knobs.cache.dir))
    torch._dynamo.reset()
    call, leaves = CALLS[name][0], make_leaves(name, device)
    dy = torch.randn_like(leaves[0])
    wanted = run_step(call, leaves, dy)
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    # Of a graph's runs the first ones warm up and record it.
    with config.patch(compile_threads=1):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = [result.clone() for result in run_step(compiled, leaves, dy)]
    for result, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))
