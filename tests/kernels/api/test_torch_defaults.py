"""Results do not depend on torch's default dtype and device, and nothing is kept from a call under others."""

import contextlib
from itertools import product

import fusednorm
import pytest
import torch
from torch import nn

from tests.kernels.api.patching.norms import GemmaRMSNorm, varied
from tests.kernels.cpu.calls import OPS, call, of_rows, tensors
from tests.sampling import mark_rest_slow


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS = {
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: default_device("meta"),
    "another device in a block": lambda: torch.device("meta"),
}


@pytest.fixture(params=DEFAULTS)
def other_defaults(request):
    """A context in which torch has another default dtype or device."""
    return DEFAULTS[request.param]


def results(op, leaves, dy):
    """The results and gradients of calls with each kind of option."""
    x, weight, bias, residual = leaves
    scale = {} if of_rows(op) else {"scale": x.detach().flatten(2)[..., 0]}
    kinds = [{}, {"activation": "silu"}, {"residual": residual}, {"dropout": 0.5, "seed": 3}, scale]
    found = []
    for options in kinds:
        for parameters in ((weight, bias), (None, None)):
            used = [t for t in (x, *parameters) if t is not None]
            y = call(op, x, *parameters, eps=1e-8, **options)[0]
            found += [y, *torch.autograd.grad(y, used, dy)]
            # Its variance is lost if eps becomes zero.
            found.append(call(op, torch.zeros_like(x), *parameters, eps=1e-8, **options)[0])
    return found


@pytest.mark.parametrize(
    ("op", "dtype"), mark_rest_slow(product(OPS, (torch.float32, torch.bfloat16, torch.float64)), together=1)
)
def test_functions_compute_the_same_under_other_defaults(op, dtype, other_defaults):
    x, weight, bias, residual, dy = tensors(op, dtype)
    leaves = [None if t is None else t.requires_grad_() for t in (x, weight, bias, residual)]
    with other_defaults():
        under = results(op, leaves, dy)
    for got, want in zip(under, results(op, leaves, dy), strict=True):
        assert got.dtype == want.dtype
        assert got.isfinite().all()
        assert torch.equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_dropout_without_a_seed_is_computed_under_other_defaults(op, other_defaults):
    x, weight, bias, _, _ = tensors(op)
    with other_defaults():
        (y,) = call(op, x, weight, bias, dropout=0.5)
    assert 0 < (y == 0).sum() < y.numel()


def test_second_derivatives_are_the_same_under_other_defaults(other_defaults):
    x, weight, bias, _, dy = tensors("layer_norm")
    x.requires_grad_()

    def twice():
        y = fusednorm.layer_norm(x, weight, bias, activation="gelu")
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with other_defaults():
        under = twice()
    assert torch.equal(under, twice())


def test_models_are_patched_under_other_defaults(other_defaults):
    model = varied(nn.Sequential(nn.LayerNorm(8), GemmaRMSNorm(8), nn.GroupNorm(2, 4), nn.SiLU()))
    x = torch.randn(2, 4, 8)
    want = model(x)
    with other_defaults():
        report = fusednorm.patch(model)
        got = model(x)
    assert not report.skipped
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_passes_of_kernels_compute_the_same_under_other_defaults(name, device, other_defaults):
    x, dy = (t.to(device) for t in torch.randn(2, 3, 8, 5))
    parameters = tuple(torch.randn(2, 8 if "group" in name else 5, device=device))[: 1 if "rms" in name else 2]
    groups = (2,) if "group" in name else ()
    forward, backward = (getattr(fusednorm, f"{name}_{p}") for p in ("forward", "backward"))

    def both():
        return *forward(x, *groups, *parameters, stats=True), *backward(dy, x, *groups, *parameters)

    with other_defaults():
        under = both()
    for got, want in zip(under, both(), strict=True):
        assert got is want is None or torch.equal(got, want)
