"""Numbers with derivatives of every order, and how near two of them must be."""

import torch

from tests.kernels.api.norm_calls import inputs

FEW = ("layer_norm", "add_rms_norm", "add_group_norm")


def detached(name, device="cpu", dtype=torch.float64):
    return [t.detach() for t in inputs(name, device, dtype)]


def total(call, *tensors):
    """A number with derivatives of every order, of all results of a call."""
    result = call(*tensors)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return sum((t.float() if t.dtype == torch.bfloat16 else t).sin().square().sum() for t in results)


def second(call, tensors):
    """Derivatives of all first derivatives, weighed and summed."""
    of_first = torch.autograd.grad(total(call, *tensors), tensors, create_graph=True, allow_unused=True)
    first = [g for g in of_first if g is not None]
    # Of one sixteenth each: what 16 bits hold.
    weights = [(torch.arange(g.numel(), device=g.device) * 7 % 16 / 16).to(g.dtype).view_as(g) for g in first]
    return torch.autograd.grad(first, tensors, weights, allow_unused=True)


def assert_same(got, want, tolerance):
    """Each tensor within `tolerance` of the norm of what it should be."""
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm() + 1e-9


def tolerance_of(dtype):
    return {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.06}[dtype]
