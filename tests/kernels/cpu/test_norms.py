"""Norms of CPU tensors against the float64 oracle, in every option, dtype and layout; and which kernels ran."""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import cpu
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.cpu import batch_invariant
from torch import Tensor

from tests.kernels.cpu.calls import OPS, call, exact, of_rows, tensors
from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.sampling import mark_rest_slow

FORWARD = {
    "layer_norm": "native_layer_norm",
    "rms_norm": "linalg_vector_norm",
    "group_norm": "native_group_norm",
    "channels_last": "native_group_norm",
}
BACKWARD = {op: "native_layer_norm_backward" if of_rows(op) else "native_group_norm_backward" for op in OPS}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
]


def check(op, x, weight, bias, residual, dy, rounded=None, **options):
    """Results and gradients of a call, no further from the oracle than the reference in float32."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    results = call(op, *leaves, **options)
    dsum = None if residual is None else torch.randn_like(residual)
    wanted = exact(op, x, weight, bias, residual, dy, dsum, **options)
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = dict(
        zip(map(id, given), torch.autograd.grad(results, given, [dy, dsum][: len(results)]), strict=True)
    )
    found = [*results, *[None] * (2 - len(results)), *(gradients.get(id(leaf)) for leaf in leaves)]
    with torch.no_grad():
        plain = call(op, x, weight, bias, residual, **options)
    for got, again in zip(results, plain, strict=True):
        torch.testing.assert_close(again, got.detach(), rtol=1e-6, atol=1e-6)
    names = ("y", "sum", "dx", "dweight", "dbias", "dresidual")
    for name, got, want in zip(names, found, wanted, strict=True):
        assert (got is None) == (want is None), name
        if got is None:
            continue
        # What a sum of some hundred terms loses in float32; a result's own dtype is one ulp.
        noise = 2e-5 if name in ("dweight", "dbias") else 4e-6
        if rounded is not None and name in ("dresidual",):
            want = want.to(rounded).double()
        assert_close_to_oracle(got, want, want, name, noise=noise)
    return results


@pytest.mark.parametrize(("dtype", "parameter_dtype"), DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op, dtype, parameter_dtype):
    x, weight, bias, _, dy = tensors(op, dtype, parameter_dtype)
    (y,) = check(op, x, weight, bias, None, dy)
    assert y.dtype == dtype


@pytest.mark.parametrize(
    ("op", "with_residual", "activation"), mark_rest_slow(product(OPS, [False, True], ACTIVATIONS))
)
def test_options_around_the_norm(op, with_residual, activation):
    options = {"activation": activation} | ({"negative_slope": 0.3} if activation == "leaky_relu" else {})
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias, residual, dy = tensors(op, dtype, torch.float32)
        results = check(op, x, weight, bias, residual if with_residual else None, dy, **options)
        if with_residual:
            assert torch.equal(results[1], (x.float() + residual.float()).to(dtype))


@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_parameter_may_be_missing(op, given, dtype):
    x, weight, bias, _, dy = tensors(op, dtype, torch.float32)
    weight, bias = weight if given[0] else None, bias if given[1] else None
    check(op, x, weight, bias, None, dy)
    check(op, x, weight, bias, None, dy, activation="silu")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_weight_around_zero_is_offset_in_float32(op):
    x, _, bias, residual, dy = tensors(op, torch.bfloat16)
    weight = torch.full((96,), 2.0**-9, dtype=torch.bfloat16)  # 1 + 2^-9 is 1 in bfloat16.
    check(op, x, weight, bias, residual, dy, weight_offset=1.0)


@pytest.mark.parametrize(
    ("op", "dtype", "names"),
    mark_rest_slow(
        product(
            ["layer_norm", "rms_norm"],
            [torch.float32, torch.bfloat16],
            [("scale",), ("shift",), ("scale", "shift"), ("scale", "shift", "gate")],
        )
    ),
)
def test_rows_of_samples_have_their_own_scale_shift_and_gate(op, dtype, names):
    x, weight, bias, residual, dy = tensors(op, dtype)
    of_samples = {name: torch.randn(7, 1, 96) / 4 for name in names}
    x, residual, dy = (each.view(7, 10, 96) for each in (x, residual, dy))
    check(op, x, weight, bias, residual if "gate" in names else None, dy, activation="silu", **of_samples)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_wide_residual_stays_wide(op):
    x, weight, bias, _, dy = tensors(op, torch.bfloat16)
    stream = torch.randn(x.shape)
    results = check(op, x, weight, bias, stream, dy)
    assert torch.equal(results[1], x.float() + stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_many_rows_are_added_up_in_float32(op, dtype):
    # In bfloat16 a sum of so many ones stops at 256.
    x = torch.randn(3000, 64).to(dtype)
    weight = torch.ones(64, dtype=torch.float32, requires_grad=True)
    dy = torch.sign(x) + 0.25
    y = call(op, x, weight, None)[0]
    (dweight,) = torch.autograd.grad(y, weight, dy.to(dtype))
    want = exact(op, x, weight.detach(), None, None, dy.to(dtype))[3]
    torch.testing.assert_close(dweight.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_pieces_of_rows_are_one_result(op, monkeypatch):
    monkeypatch.setattr("fusednorm.cpu.chunks.PIECE_ELEMENTS", 1000)
    x, weight, bias, _, dy = tensors(op, torch.bfloat16, torch.float32)
    check(op, x, weight, bias, torch.randn(x.shape), dy, activation="gelu")
    check(op, x, weight, bias, None, dy)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_strides_of_rows_do_not_matter(op):
    x, weight, bias, residual, dy = (None if t is None else t for t in tensors(op))
    columns, sparse = x.t().contiguous().t(), torch.stack([residual, dy], -1)
    for some, other in ((columns, sparse[..., 0]), (x.repeat(1, 2)[:, 96:], residual)):
        y, total = check(op, some, weight, bias, other, dy)
        assert y.is_contiguous()
        assert total.is_contiguous()
        (y,) = check(op, some, weight, bias, None, sparse[..., 1])
        assert y.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8), (2, 8, 3, 4), (1, 8, 3, 4), (2, 8, 1, 1), (2, 8, 2, 3, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_groups_keep_their_layout(shape, last):
    def lay(t):
        return t.movedim(1, -1).contiguous().movedim(-1, 1) if last else t

    x, residual, dy = (lay(torch.randn(shape)) for _ in range(3))
    weight, bias = torch.randn(2, 8)
    for options in ({}, {"activation": "silu"}):
        (y,) = check("group_norm", x, weight, bias, None, dy, **options)
        assert lay(y.detach()).stride() == y.stride()
    for of_residual, of_y in ((residual.contiguous(), dy), (residual, dy.contiguous())):
        check("group_norm", x, weight, bias, of_residual, of_y)


@pytest.mark.parametrize("mean", [3.0, 1e3, 1e5])
@pytest.mark.parametrize("op", OPS)
def test_a_mean_far_from_zero_does_not_cancel(op, mean):
    x, weight, bias, _, dy = tensors(op, mean=mean)
    leaves = [None if t is None else t.requires_grad_() for t in (x, weight, bias)]
    (y,) = call(op, *leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    found = y, *torch.autograd.grad(y, given, dy)
    y, _, dx, dweight, dbias, _ = exact(op, *(None if t is None else t.detach() for t in leaves), None, dy)
    for got, want in zip(found, (t for t in (y, dx, dweight, dbias) if t is not None), strict=True):
        # What rounding the mean itself to float32 does.
        tolerance = 2 * (1 + mean) * torch.finfo(torch.float32).eps * (1 if of_rows(op) else 20)
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max().clamp_min(1.0)


def test_channels_last_groups_far_from_zero_are_not_torchs(monkeypatch):
    near, far = (tensors("channels_last", mean=mean)[0] for mean in (0.0, 30.0))
    asked = []
    for name in ("group_norm_forward", "group_norm_backward"):
        compute = getattr(batch_invariant, name)
        monkeypatch.setattr(batch_invariant, name, lambda *a, f=compute, **k: asked.append(f) or f(*a, **k))
    for x, calls in ((near, 0), (far, 2)):
        result = cpu.group_norm_forward(x, 2, stats=True)
        cpu.group_norm_backward(x, x, 2, mean=result.mean, rstd=result.rstd)
        assert len(asked) == calls


def test_a_nan_stays_in_its_group():
    for op in ("group_norm", "channels_last"):
        x = tensors(op)[0]
        x[1, 2, 3, 3] = float("nan")
        (y,) = call(op, x, None, None)
        assert y[1, :4].isnan().all()
        assert y[1, 4:].isfinite().all()
        assert y[[0, 2]].isfinite().all()


class Nodes:
    """Which nodes of autograd a result came through."""

    def __init__(self, y: Tensor):
        self.names, todo = set(), [y.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None:
                self.names.add(node.name())
                todo += [following for following, _ in node.next_functions]


@pytest.mark.parametrize("op", [op for op in OPS if op != "rms_norm"])
def test_a_plain_norm_is_torchs_own_function(op):
    x, weight, bias, residual, _ = tensors(op)
    x.requires_grad_()
    own = "NativeLayerNormBackward0" if of_rows(op) else "NativeGroupNormBackward0"
    assert own in Nodes(call(op, x, weight, bias)[0]).names
    assert own in Nodes(call(op, x, weight.bfloat16(), bias)[0]).names
    for more in ({"residual": residual}, {"activation": "silu"}, {"dropout": 0.5}):
        assert "_NormFunctionBackward" in Nodes(call(op, x, weight, bias, **more)[0]).names


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("op", OPS)
def test_one_tensor_alone_may_be_trained(op, trained):
    x, weight, bias, _, dy = tensors(op)
    given = [x, weight, bias]
    if given[trained] is None:
        return
    leaf = given[trained].requires_grad_()
    (gradient,) = torch.autograd.grad(call(op, x, weight, bias)[0], leaf, dy)
    want = exact(op, x.detach(), weight.detach(), None if bias is None else bias.detach(), None, dy)[2 + trained]
    torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("op", "dtype", "options"),
    mark_rest_slow(product(OPS, [torch.float32, torch.bfloat16], [{}, {"activation": "silu"}, {"residual": True}])),
)
def test_torchs_kernels_run(op, dtype, options):
    x, weight, bias, residual, dy = tensors(op, dtype)
    weight.requires_grad_()
    options = options | ({"residual": residual} if "residual" in options else {})
    # Not a mode: it would be shown the operators.
    with torch.autograd.profiler.profile() as profile:
        call(op, x, weight, bias, **options)[0].backward(dy)
    names = {event.name.removeprefix("aten::") for event in profile.function_events}
    assert {FORWARD[op], BACKWARD[op]} <= names
    assert not names & {"mean", "var", "pow"}


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_what_is_wrong_is_said_as_everywhere(op):
    x, weight, bias, residual, _ = tensors(op)
    wrong = (
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"activation": "tanh"}, "activation must be"),
        ({"weight": weight[1:]}, r"x \[.*\] needs weight \[.*\], got \["),
        ({"weight": weight.long()}, "weight must be float32"),
        ({"weight": weight.to("meta")}, "weight must be on x's device"),
        ({"x": x.long()}, "x must be float32"),
        ({"residual": residual[:1]}, "residual must have x's shape"),
    )
    for change, message in wrong:
        with pytest.raises(fusednorm.KernelInputError, match=message):
            call(op, **{"x": x, "weight": weight, "bias": bias} | change)
    if op == "group_norm":
        with pytest.raises(fusednorm.KernelInputError, match="x must"):
            call(op, x[:, :0], None, None)
    assert call(op, x[:0], weight, bias)[0].shape == (0, *x.shape[1:])


@pytest.mark.parametrize("op", OPS)
def test_plain_norms_are_differentiated_twice(op):
    x, weight, bias, _, dy = tensors(op)
    twice = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        y = call(op, leaves[0], leaves[1], leaves[2] if bias is not None else None)[0]
        first = torch.autograd.grad(y.sin().sum(), leaves, dy.new_ones((), dtype=dtype), create_graph=True)
        twice.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for got, want in zip(*twice, strict=True):
        assert (got.double() - want).norm() <= 1e-4 * want.norm()
