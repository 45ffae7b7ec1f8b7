"""DTensors: the parts of ranks, one after another in this process, and the placements of results and gradients."""

import fusednorm
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 2
SHAPE = (4, 6, 4, 8)

CALLS = {
    "rows": lambda x, weight, bias, residual: fusednorm.add_layer_norm(x, residual, weight, bias),
    "rms rows": lambda x, weight, bias, residual: fusednorm.add_rms_norm(x, residual, weight),
    "heads": lambda x, weight, bias, residual: fusednorm.add_layer_norm(x, residual, weight, bias),
    "rows of samples": lambda x, scale, shift, residual: fusednorm.add_layer_norm(
        x, residual, scale=scale, shift=shift, gate=shift
    ),
    "samples": lambda x, weight, bias, residual: fusednorm.add_group_norm(x, residual, 2, weight, bias),
}
PARAMETERS = {"rows": (8,), "rms rows": (8,), "heads": (4, 8), "rows of samples": (4, 6, 8), "samples": (6,)}
DIVISIONS = [
    ("rows", 0),
    ("rows", 2),
    ("rms rows", 1),
    ("heads", 1),
    ("heads", 2),
    ("rows of samples", 1),
    ("rows of samples", 2),
    ("samples", 0),
]
DIVIDED_PARAMETERS = {("heads", 2): 0, ("rows of samples", 1): 1}
"""The axis along which parameters are divided as x is."""


@pytest.fixture
def mesh():
    """Two ranks that exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def outcome(name, tensors):
    """Results and gradients of a call."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = tuple(CALLS[name](*leaves))
    used = [leaf for leaf in leaves if name != "rms rows" or leaf is not leaves[2]]
    return results, torch.autograd.grad(results, used, [result.detach() for result in results])


@pytest.mark.parametrize(("name", "axis"), DIVISIONS)
def test_each_rank_computes_its_part(name, axis, mesh):
    x, residual = torch.randn(2, *SHAPE)
    weight, bias = torch.randn(2, *PARAMETERS[name])
    wanted = outcome(name, (x, weight, bias, residual))
    divided = DIVIDED_PARAMETERS.get((name, axis))
    of_parameter, of_gradient = (Replicate(), Partial()) if divided is None else (Shard(divided), Shard(divided))
    parts = []
    for rank in range(RANKS):
        local_x, local_residual = (tensor.chunk(RANKS, axis)[rank] for tensor in (x, residual))
        local_parameters = [t if divided is None else t.chunk(RANKS, divided)[rank] for t in (weight, bias)]
        local = (local_x, *local_parameters, local_residual)
        placements = (Shard(axis), of_parameter, of_parameter, Shard(axis))
        given = [DTensor.from_local(t, mesh, [p]) for t, p in zip(local, placements, strict=True)]
        results, gradients = outcome(name, given)
        assert all(tensor.placements == (Shard(axis),) for tensor in (*results, gradients[0], gradients[-1]))
        assert all(gradient.placements == (of_gradient,) for gradient in gradients[1:-1])
        parts.append([tensor.to_local() for tensor in (*results, *gradients)])
    of_all = [Shard(axis), Shard(axis), Shard(axis), *(of_gradient for _ in wanted[1][1:-1]), Shard(axis)]
    for want, placement, *local in zip((*wanted[0], *wanted[1]), of_all, *parts, strict=True):
        got = sum(local) if placement == Partial() else torch.cat(local, placement.dim)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_replicated_tensors_stay_replicated(name, mesh):
    tensors = torch.randn(SHAPE), *torch.randn(2, *PARAMETERS[name]), torch.randn(SHAPE)
    wanted = outcome(name, tensors)
    given = [DTensor.from_local(tensor, mesh, [Replicate()]) for tensor in tensors]
    found = outcome(name, given)
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert got.placements == (Replicate(),)
        torch.testing.assert_close(got.to_local(), want)


def test_a_mask_of_dropout_is_not_divided(mesh):
    x = DTensor.from_local(torch.randn(2, 8), mesh, [Shard(0)])
    assert fusednorm.layer_norm(x, dropout=0.5, seed=1).placements == (Replicate(),)


def test_a_compiled_call_knows_the_placements(mesh, monkeypatch):
    monkeypatch.setattr("fusednorm.api.sharding._is_registered", False)
    weight = DTensor.from_local(torch.ones(8), mesh, [Replicate()])
    x = DTensor.from_local(torch.randn(2, 8), mesh, [Shard(0)])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fusednorm.rms_norm(x, weight), backend="aot_eager", fullgraph=True)
    y = compiled(x)
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.to_local(), fusednorm.rms_norm(x.to_local()))
