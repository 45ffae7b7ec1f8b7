"""The oracle against torch's own operators and autograd, in float64; the rest is tested against it."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.errors import KernelInputError, UnsupportedShapeError
from fusednorm.reference.dropout import compute_dropout_mask, compute_philox_words
from torch import Tensor

from tests.kernels.harness.activations import TORCH_ACTIVATIONS
from tests.sampling import mark_rest_slow

P, SEED = 0.3, -(2**40) - 5


def random(*shape: int, dtype=torch.float64, scale=1.0, seed=0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def channels_last(x: Tensor) -> Tensor:
    """The same values with the channel axis last in memory."""
    order = (0, *range(2, x.dim()), 1)
    return x.permute(order).contiguous().permute(0, x.dim() - 1, *range(1, x.dim() - 1))


def torch_norm(operation: str, h: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    if operation == "layer_norm":
        return F.layer_norm(h, h.shape[-1:], weight, bias, 1e-5)
    if operation == "rms_norm":
        return F.rms_norm(h, h.shape[-1:], weight, 1e-6)
    return F.group_norm(h, groups, weight, bias, 1e-5)


@pytest.mark.parametrize(
    ("affine", "operation", "activation"),
    mark_rest_slow(
        product([True, False], ["layer_norm", "rms_norm", "group_norm", "group_norm channels-last"], ACTIVATIONS)
    ),
)
def test_both_passes_agree_with_torch_autograd(operation, activation, affine):
    operation, _, layout = operation.partition(" ")
    groups = (3,) if operation == "group_norm" else ()
    shape = (2, 6, 3, 5) if groups else (4, 3, 7)
    size = shape[1] if groups else shape[-1]
    lay = channels_last if layout else lambda t: t
    x, residual, dy, dh = (lay(random(*shape, seed=i)) for i in range(4))
    weight = random(size, seed=5) if affine else None
    bias = random(size, seed=6) if affine and operation != "rms_norm" else None
    parameters = [p for p in (weight, bias) if p is not None]

    forward = getattr(reference, f"{operation}_forward")
    backward = getattr(reference, f"{operation}_backward")
    given = {} if operation == "rms_norm" else {"bias": bias}
    ours = forward(
        x,
        *groups,
        weight,
        **given,
        residual=residual,
        activation=activation,
        dropout=P,
        seed=SEED,
        stats=True,
    )
    grads = backward(
        dy, x, *groups, weight, **given, residual=residual, dresidual_out=dh,
        activation=activation, dropout=P, seed=SEED,
    )  # fmt: skip
    saved = backward(
        dy, x, *groups, weight, **given, residual=residual, dresidual_out=dh,
        activation=activation, dropout=P, seed=SEED, rstd=ours.rstd,
        **({} if operation == "rms_norm" else {"mean": ours.mean}),
    )  # fmt: skip

    leaves = [t.clone().requires_grad_() for t in (x, residual, *parameters)]
    h = leaves[0] + leaves[1]
    w = leaves[2] if weight is not None else None
    b = leaves[3] if bias is not None else None
    rows, positions = (shape[0], math.prod(shape[1:])) if groups else (12, 7)
    keep = compute_dropout_mask(SEED, rows, positions, P, "cpu")
    keep = keep.view(2, 3, 5, 6).permute(0, 3, 1, 2) if layout else keep.view(shape)
    y = TORCH_ACTIVATIONS[activation](torch_norm(operation, h, w, b, *groups or (0,))) * keep / (1 - P)
    expected = torch.autograd.grad([y, h], leaves, [dy, dh])

    torch.testing.assert_close(ours.y, y.detach())
    torch.testing.assert_close(ours.residual_out, x + residual)
    assert ours.y.stride() == x.stride()
    for got in (grads, saved):
        torch.testing.assert_close(got.dx, expected[0])
        assert got.dx.stride() == x.stride()
        for gradient, wanted in zip((got.dweight, got.dbias), expected[2:], strict=False):
            torch.testing.assert_close(gradient, wanted)
    assert (grads.dweight is None) == (weight is None)
    assert (grads.dbias is None) == (bias is None)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 7), (2, 6, 2, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_has_any_spatial_rank_and_any_group(shape, groups):
    x = random(*shape, scale=3.0)
    y = F.group_norm(x, groups) if len(shape) > 2 or groups < 6 else torch.zeros_like(x)
    torch.testing.assert_close(reference.group_norm_forward(x, groups).y, y)
    if len(shape) > 2:
        torch.testing.assert_close(reference.group_norm_forward(channels_last(x), groups).y, y)


def test_statistics_have_the_shape_of_their_rows_or_groups():
    x = random(2, 6, 3, 5)
    rows = reference.layer_norm_forward(x, stats=True)
    groups = reference.group_norm_forward(x, 3, stats=True)
    torch.testing.assert_close(rows.mean, x.mean(-1))
    torch.testing.assert_close(rows.rstd, (x.var(-1, correction=0) + 1e-5).rsqrt())
    torch.testing.assert_close(groups.mean, x.view(2, 3, -1).mean(-1))
    assert reference.layer_norm_forward(x).mean is None
    assert reference.rms_norm_forward(x, stats=True).mean is None
    assert reference.rms_norm_forward(x, stats=True).rstd.shape == (2, 6, 3)


def test_sums_are_float32_and_outputs_have_the_dtypes_asked_for():
    x = random(3, 8, dtype=torch.float16, seed=1)
    weight, bias = random(8, dtype=torch.float32), random(8, dtype=torch.bfloat16)
    forward = reference.layer_norm_forward(x, weight, bias, residual=x, out_dtype=torch.bfloat16, stats=True)
    assert (forward.y.dtype, forward.residual_out.dtype) == (torch.bfloat16, torch.float16)
    assert forward.mean.dtype == torch.float32
    wide = reference.layer_norm_forward(x, stats=True, precision=torch.float64)
    assert (wide.mean.dtype, wide.y.dtype) == (torch.float64, torch.float16)
    grads = reference.layer_norm_backward(x, x, weight, bias)
    assert grads.dresidual is None
    assert [t.dtype for t in grads[:3]] == [torch.float16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm"])
def test_an_offset_is_part_of_the_weight(operation):
    x, dy, weight = random(4, 7), random(4, 7, seed=1), random(7)
    options = {"activation": "silu", "residual": random(4, 7, seed=2)}
    forward, backward = (getattr(reference, f"{operation}_{direction}") for direction in ("forward", "backward"))
    torch.testing.assert_close(forward(x, weight, weight_offset=1.0, **options), forward(x, weight + 1, **options))
    torch.testing.assert_close(
        backward(dy, x, weight, weight_offset=1.0, **options), backward(dy, x, weight + 1, **options)
    )


def test_the_sum_and_its_gradient_have_the_residuals_dtype():
    x, residual, dy = random(3, 8, dtype=torch.float16), random(3, 8, dtype=torch.float32, seed=1), random(3, 8)
    assert torch.equal(reference.rms_norm_forward(x, residual=residual).residual_out, x.float() + residual)
    grads = reference.layer_norm_backward(dy, x, residual=residual, dresidual_out=residual)
    assert (grads.dx.dtype, grads.dresidual.dtype) == (torch.float16, torch.float32)
    assert torch.equal(grads.dx, grads.dresidual.half())
    same = reference.layer_norm_backward(dy, x, residual=x)
    assert same.dresidual is same.dx


def test_statistics_are_of_the_sum_before_it_is_rounded():
    x, residual = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([[2.0**-13, -(2.0**-13)]]).half()
    forward = reference.layer_norm_forward(x, residual=residual, eps=1e-12, stats=True)
    assert forward.residual_out.tolist() == [[1.0, 2.0]]
    assert forward.rstd.item() == pytest.approx(1 / (0.5 - 2.0**-13), rel=1e-6)


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e5])
@pytest.mark.parametrize("operation", ["layer_norm", "group_norm", "group_norm channels-last"])
def test_a_mean_far_from_zero_costs_no_accuracy(operation, mean):
    operation, _, layout = operation.partition(" ")
    x, dy = (random(4, 8, 5, 25, dtype=torch.float32, seed=seed) for seed in (1, 2))
    x = x + mean
    x, dy = (channels_last(t) for t in (x, dy)) if layout else (x, dy)
    groups = () if operation == "layer_norm" else (2,)
    parameters = random(2, 25 if operation == "layer_norm" else 8, dtype=torch.float32)
    forward, backward = (getattr(reference, f"{operation}_{p}") for p in ("forward", "backward"))

    def results(**precision):
        made = forward(x, *groups, *parameters, stats=True, **precision)
        gradients = backward(dy, x, *groups, *parameters, **precision)
        return made.y, made.rstd, gradients.dx, gradients.dbias, gradients.dweight

    found, wanted = results(), results(precision=torch.float64)
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).abs().max() <= 2e-6 * want.abs().max()
    # A saved mean is rounded.
    saved = forward(x, *groups, *parameters, stats=True)
    dweight = backward(dy, x, *groups, *parameters, mean=saved.mean, rstd=saved.rstd).dweight
    summed = [axis for axis in range(4) if axis != (3 if operation == "layer_norm" else 1)]
    allowed = (mean * 2**-24 * 1.1 + 1e-6) * dy.double().abs().sum(summed)
    assert ((dweight.double() - wanted[-1]).abs() <= allowed).all()


def test_no_rows_give_empty_results():
    assert reference.layer_norm_forward(random(0, 5)).y.shape == (0, 5)
    grads = reference.group_norm_backward(random(0, 4, 3), random(0, 4, 3), 2, random(4), random(4))
    assert grads.dx.shape == (0, 4, 3)
    assert grads.dweight.tolist() == [0.0] * 4


def test_philox_words_are_the_published_ones():
    """The all-zero vector is Random123's answer for seven rounds; the others run in Python's integers."""

    def philox(counter, key):
        c, k = list(counter), list(key)
        for _ in range(7):
            product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [
                (product1 >> 32) ^ c[1] ^ k[0],
                product1 % 2**32,
                (product0 >> 32) ^ c[3] ^ k[1],
                product0 % 2**32,
            ]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        return c

    assert philox((0, 0, 0, 0), (0, 0)) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    for seed, row, quad in [(0, 0, 0), (-1, 2**62 + 3, 2**32 - 1), (2**63 - 1, 2**33, 77)]:
        words = compute_philox_words(seed, torch.tensor(row), torch.tensor(quad))
        counter = (quad, row % 2**32, row >> 32, 0)
        assert [int(w) for w in words] == philox(counter, (seed % 2**32, (seed >> 32) % 2**32))


def test_dropout_is_a_function_of_row_and_position_alone():
    mask = compute_dropout_mask(7, 5, 1001, 0.25, "cpu")
    assert mask[:3, :10].equal(compute_dropout_mask(7, 3, 10, 0.25, "cpu"))
    assert not mask.equal(compute_dropout_mask(8, 5, 1001, 0.25, "cpu"))
    assert mask.float().mean().item() == pytest.approx(0.75, abs=0.02)


def test_dropout_of_group_norm_counts_in_memory_order():
    x = random(2, 4, 3, 3)
    dropped = {"dropout": 0.5, "seed": 3}
    contiguous = reference.group_norm_forward(x, 2, **dropped).y
    last = reference.group_norm_forward(channels_last(x), 2, **dropped).y
    mask = compute_dropout_mask(3, 2, 36, 0.5, "cpu")
    assert (contiguous != 0).flatten(1).equal(mask)
    assert (last != 0).permute(0, 2, 3, 1).flatten(1).equal(mask)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: reference.layer_norm_forward(x[:, :0]), "cols >= 1"),
        (lambda x: reference.layer_norm_forward(x, activation="swish"), "activation must be one of"),
        (lambda x: reference.layer_norm_forward(x, dropout=1.0, seed=0), r"dropout must be in \[0, 1\)"),
        (lambda x: reference.layer_norm_forward(x, dropout=0.1), "needs a seed"),
        (lambda x: reference.group_norm_forward(x, 4), "divide C = 6"),
        (lambda x: reference.group_norm_forward(x[0], 1), r"\[N, C, \*spatial\]"),
        (lambda x: reference.group_norm_forward(x.view(4, 6, 1)[..., :0], 2), "at least one element"),
    ],
)
def test_what_means_nothing_is_refused(call, message):
    with pytest.raises(KernelInputError, match=message):
        call(random(4, 6))


def test_other_strides_are_refused():
    with pytest.raises(UnsupportedShapeError, match="contiguous or channels-last"):
        reference.group_norm_forward(random(2, 6, 4, 4)[:, :, ::2], 3)


def test_scale_and_shift_follow_group_norms_affine_step():
    x, dy = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    weight, bias = torch.randn(2, 6, dtype=torch.float64)
    scale, shift = torch.randn(2, 2, 6, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, scale, shift)]
    y = F.group_norm(leaves[0], 3, *leaves[1:3]) * (1 + leaves[3][..., None]) + leaves[4][..., None]
    F.silu(y).backward(dy)
    actual = reference.group_norm_backward(dy, x, 3, weight, bias, scale=scale, shift=shift, activation="silu")
    gradients = (actual.dx, actual.dweight, actual.dbias, actual.dscale, actual.dshift)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)
