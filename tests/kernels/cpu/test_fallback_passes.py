"""Calls of CPU tensors with options that torch's norms do not have: who computes them, and what."""

import itertools
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import cpu, reference
from fusednorm.cpu import fallback_passes
from fusednorm.tensors.arrays import FLOAT_DTYPES

from tests.kernels.cpu.calls import OPS, of_rows
from tests.sampling import mark_rest_slow

DROPOUT = {"dropout": 0.4, "seed": 7}
CALLS = {
    "dropout": ("layer_norm", (4, 6), DROPOUT),
    "heads": ("layer_norm", (4, 2, 6), {"weight": torch.ones(2, 6)}),
    "long rows": ("rms_norm", (1, 2**16 + 1), {}),
    "rows of one value": ("rms_norm", (4, 1), {}),
    "scale": ("group_norm", (4, 6, 3), {"scale": torch.ones(4, 6)}),
    "shift": ("group_norm", (4, 6, 3), {"shift": torch.ones(4, 6)}),
    "scale of rows": ("layer_norm", (4, 5, 6), {"scale": torch.ones(4, 6)}),
    "dropout and shift of rows": ("rms_norm", (4, 5, 6), {"shift": torch.ones(4, 1, 6), **DROPOUT}),
}


@pytest.fixture(autouse=True)
def without_small_calls(monkeypatch):
    monkeypatch.setattr(fallback_passes, "_SMALL_ELEMENTS", 0)


def refuse(*arguments, **named):
    raise AssertionError("the reference computes a call")


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("name", CALLS)
def test_the_reference_does_not_compute_values_in_float32(name, activation, monkeypatch):
    op, shape, options = CALLS[name]
    for direction in ("forward", "backward"):
        monkeypatch.setattr(reference, f"{op}_{direction}", refuse)
    groups = (2,) if op == "group_norm" else ()
    x = torch.randn(shape, requires_grad=True)
    getattr(fusednorm, op)(x, *groups, activation=activation, **options).sum().backward()
    with torch.no_grad():
        getattr(fusednorm, op)(x, *groups, activation=activation, **options)


REFERENCE = {
    "float64": (torch.randn(4, 6, dtype=torch.float64), {}),
    "rows of one value": (torch.randn(4, 1), {}),
    "few heads": (torch.randn(4, 2, 6), {"weight": torch.ones(2, 6)}),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_what_the_reference_computes(name, monkeypatch):
    x, options = REFERENCE[name]
    monkeypatch.setattr(fallback_passes, "_SMALL_ELEMENTS", 48)
    monkeypatch.setattr(reference, "layer_norm_forward", refuse)
    with pytest.raises(AssertionError, match="the reference"):
        fusednorm.layer_norm(x, activation="silu", **options)


def inputs_of(op, dtype, generator):
    """Tensors by name, for every option of the operation, and the number of groups."""

    def made(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    if of_rows(op):
        shape, parameters = (5, 3, 40), (3, 40)
        named = {"weight": made(*parameters, dtype=dtype), "bias": made(*parameters)}
        like_x = [made(*shape, dtype=dtype), made(*shape), made(*shape, dtype=dtype), made(*shape)]
        if op == "rms_norm":
            del named["bias"]
        return named, like_x, {}
    shape = (3, 8, 5, 7)
    named = {"weight": made(8, dtype=dtype), "bias": made(8), "scale": made(3, 8), "shift": made(3, 8, dtype=dtype)}
    like_x = [made(*shape, dtype=dtype) for _ in range(4)]
    if op == "channels_last":
        like_x = [each.contiguous(memory_format=torch.channels_last) for each in like_x]
    return named, like_x, {"num_groups": 2}


@pytest.mark.parametrize(
    ("op", "dtype", "activation"), mark_rest_slow(product(OPS, FLOAT_DTYPES, ["none", "gelu"]))
)
def test_results_are_the_references(op, dtype, activation):
    name = "group_norm" if op == "channels_last" else op
    named, (x, residual, dy, dsum), groups = inputs_of(op, dtype, torch.Generator().manual_seed(3))
    # float16 and bfloat16 round; terms of sums cancel.
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for sum_given, dropped, stats in itertools.product((False, True), repeat=3):
        given = {"x": x, **named, **groups, "eps": 1e-4, "activation": activation}
        given |= {"residual": residual} if sum_given else {}
        given |= DROPOUT if dropped else {}
        forward = getattr(cpu, f"{name}_forward")(**given, stats=True)
        backward_given = given | {"dy": dy} | ({"dresidual_out": dsum} if sum_given else {})
        if stats:
            backward_given |= {"rstd": forward.rstd} | ({} if op == "rms_norm" else {"mean": forward.mean})
        backward = getattr(cpu, f"{name}_backward")(**backward_given)
        wanted = getattr(reference, f"{name}_forward")(**given, stats=True)
        wanted_backward = getattr(reference, f"{name}_backward")(**backward_given)
        for found, right in ((forward, wanted), (backward, wanted_backward)):
            for field, want in right._asdict().items():
                got = getattr(found, field)
                assert (got is None) == (want is None), field
                if got is None:
                    continue
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), field
                largest = want.double().abs().max().clamp(min=1.0)
                assert (got.double() - want.double()).abs().max() <= tolerance * largest, field
                assert not got._is_view(), field
        assert (backward.dresidual is backward.dx) == (wanted_backward.dresidual is wanted_backward.dx)
        if dropped:
            # Where an activation ends near zero, one of the two may round to it.
            clear = getattr(reference, f"{name}_forward")(**given | {"dropout": 0.0}).y.abs() > tolerance
            assert torch.equal((forward.y == 0) & clear, (wanted.y == 0) & clear)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_strides_of_rows_do_not_matter(op):
    x = torch.randn(6, 4, 10).movedim(0, -1)
    dy = torch.randn(10, 4, 12)[..., ::2].movedim(0, 1)
    x = x.movedim(1, 0)
    dy = dy.movedim(1, 0)
    options = {"eps": 1e-5, "weight_offset": 0.0, "activation": "silu", **DROPOUT, "weight": torch.randn(6)}
    forward = fallback_passes.compute_fallback_forward(op, x=x, **options, stats=True)
    wanted = getattr(reference, f"{op}_forward")(x, **options, stats=True)
    assert forward.y.is_contiguous()
    torch.testing.assert_close(forward.y, wanted.y, rtol=1e-5, atol=1e-5)
    backward = fallback_passes.compute_fallback_backward(op, x=x, dy=dy, **options, parameter_gradients=False)
    torch.testing.assert_close(backward.dx, getattr(reference, f"{op}_backward")(dy, x, **options).dx)
    assert backward.dweight is None


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_results_may_be_changed_in_place(op):
    groups = (2,) if op == "group_norm" else ()
    x = torch.randn(4, 8, 6, requires_grad=True)
    getattr(fusednorm, op)(x, *groups, **DROPOUT).add_(1.0).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dropout": 1.0, "seed": 1}, r"dropout must be in \[0, 1\)"),
        ({"dropout": 0.5, "seed": 2**63}, "seed must be an int of 64 bits"),
        ({"eps": -1.0, **DROPOUT}, "eps must be at least 0"),
        ({"activation": "tanh", **DROPOUT}, "activation must be"),
        ({"weight": torch.ones(3), **DROPOUT}, "needs weight"),
    ],
)
def test_invalid_calls_are_refused_as_by_the_reference(op, wrong, message):
    groups = (2,) if op == "group_norm" else ()
    with pytest.raises(fusednorm.KernelInputError, match=message):
        getattr(fusednorm, op)(torch.randn(4, 8, 6), *groups, **wrong)
