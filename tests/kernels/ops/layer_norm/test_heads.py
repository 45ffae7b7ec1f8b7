"""Heads that have parameters of their own, and heads that no common stride reaches, against the float64 oracle.

Lengths: a tile with empty lanes, a tile that is full, and forward a row that is swept; nothing else in a kernel
knows of heads.
"""

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, UnsupportedShapeError, reference

HEADS = 3


def contiguous(tokens, cols, device):
    return torch.randn(2, tokens, HEADS, cols, device=device)


def slice_of_qkv(tokens, cols, device):
    """Queries of 3 heads before keys and values of one: a token's heads lie together, tokens further apart."""
    qkv = torch.randn(2, tokens, (HEADS + 2) * cols, device=device)
    return qkv[..., : HEADS * cols].view(2, tokens, HEADS, cols)


def interleaved(tokens, cols, device):
    """Each head's query, key and value together: all rows of queries lie 3 * cols apart."""
    return torch.randn(2, tokens, HEADS, 3 * cols, device=device)[..., :cols]


LAYOUTS = (contiguous, slice_of_qkv, interleaved)


def check(op, x, own=True, **options):
    """Both passes, backward with saved statistics and without."""
    shape = x.shape[-2:] if own else x.shape[-1:]
    parameters = [torch.randn(shape, device=x.device) for _ in range(1 if op == "rms_norm" else 2)]
    dy = torch.randn(x.shape, device=x.device)
    actual, exact = (
        getattr(library, f"{op}_forward")(x, *parameters, stats=True, **options, **precision)
        for library, precision in ((fusednorm, {}), (reference, {"precision": torch.float64}))
    )
    saved = {"rstd": actual.rstd} if op == "rms_norm" else {"mean": actual.mean, "rstd": actual.rstd}
    assert_same(actual, exact)
    if x.shape[-1] > 8192:
        return
    run = getattr(fusednorm, f"{op}_backward")
    exact = getattr(reference, f"{op}_backward")(dy, x, *parameters, **options, precision=torch.float64)
    assert_same(run(dy, x, *parameters, **options), exact)
    assert_same(run(dy, x, *parameters, **options, **saved), exact)


def assert_same(actual, exact):
    for name, right in exact._asdict().items():
        got = getattr(actual, name)
        assert (got is None) == (right is None), name
        if right is not None:
            assert got.shape == right.shape, name
            torch.testing.assert_close(got, right.float(), rtol=1e-5, atol=2e-5 * float(right.abs().max() + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "cols", "tokens"), [("layer_norm", 64, 40), ("rms_norm", 100, 9)])
def test_heads_with_parameters_of_their_own(op, cols, tokens, layout, device, poisoned):
    check(op, layout(tokens, cols, device), activation="silu")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_slice_of_qkv_with_one_weight_for_all_heads(op, device, poisoned):
    check(op, slice_of_qkv(20, 64, device), own=False, weight_offset=1.0)


@pytest.mark.parametrize("layout", [slice_of_qkv, interleaved])
def test_heads_too_long_for_a_tile_are_swept(layout, device, poisoned):
    check("layer_norm", layout(1, 1100, device))
    check("rms_norm", layout(1, 9000, device))


def test_heads_with_residual_dropout_and_outside_gradient(device, poisoned):
    x, residual, outside = slice_of_qkv(5, 32, device), contiguous(5, 32, device), slice_of_qkv(5, 32, device)
    weight, bias = torch.randn(2, HEADS, 32, device=device)
    options = {"residual": residual.bfloat16(), "dropout": 0.4, "seed": 9}
    actual = fusednorm.layer_norm_forward(x, weight, bias, **options)
    exact = reference.layer_norm_forward(x, weight, bias, **options, precision=torch.float64)
    assert torch.equal(actual.y == 0, exact.y == 0)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.residual_out, exact.residual_out, rtol=2**-7, atol=0)
    actual, exact = (
        library.layer_norm_backward(outside, x, weight, bias, dresidual_out=outside, **options, **precision)
        for library, precision in ((fusednorm, {}), (reference, {"precision": torch.float64}))
    )
    torch.testing.assert_close(actual.dx, exact.dx.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.dresidual, exact.dresidual, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(actual.dweight, exact.dweight.float(), rtol=1e-4, atol=1e-4)


def test_one_token_and_one_head(device):
    check("layer_norm", torch.randn(HEADS, 48, device=device))
    check("layer_norm", torch.randn(5, 1, 48, device=device))
    check("rms_norm", torch.randn(5, 96, device=device)[:, :48].unsqueeze(1))


def test_no_tokens_give_empty_results(device):
    x, weight = torch.empty(0, HEADS, 8, device=device), torch.ones(HEADS, 8, device=device)
    assert fusednorm.layer_norm_forward(x, weight, weight).y.shape == x.shape
    assert torch.equal(fusednorm.layer_norm_backward(x, x, weight, weight).dweight, torch.zeros_like(weight))


def test_what_cannot_be_heads_is_refused(device):
    x = torch.randn(2, 4, HEADS, 8, device=device)
    weight = torch.ones(HEADS, 8, device=device)
    for library in (fusednorm, reference):
        with pytest.raises(KernelInputError, match=r" needs weight \[3, 8\], got \[8, 3\]"):
            library.rms_norm_forward(x, weight.t().contiguous())
        with pytest.raises(KernelInputError, match=r" needs bias \[3, 8\], got \[8\]"):
            library.layer_norm_forward(x, weight, weight[0])
        with pytest.raises(KernelInputError, match=r" needs bias \[8\], got \[1, 8\]"):
            library.layer_norm_forward(x, weight[0], weight[:1])
        with pytest.raises(KernelInputError, match=r" needs weight \[8\], got \[3, 8\]"):
            library.rms_norm_forward(x[0, 0, 0], weight)
    with pytest.raises(UnsupportedShapeError, match="one constant stride apart"):
        fusednorm.rms_norm_forward(torch.randn(2, HEADS, 4, 8, device=device).transpose(1, 2), weight)
    with pytest.raises(UnsupportedShapeError, match="heads of every token must lie 8 elements apart"):
        fusednorm.rms_norm_forward(torch.randn(4, 5, 16, device=device)[:, :HEADS, :8], weight)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 8192), (torch.bfloat16, 12288)])
def test_backward_has_a_longest_row_of_heads_for_each_size_of_element(device, dtype, most):
    for cols in (most, most + 1):
        x = torch.zeros(2, HEADS, cols, dtype=dtype, device=device)
        weight = torch.ones(HEADS, cols, device=device)
        if cols == most:
            assert not fusednorm.rms_norm_backward(x, x, weight).dx.any()
            continue
        with pytest.raises(UnsupportedShapeError, match=f"rows of {cols} columns are too long for separate "):
            fusednorm.rms_norm_backward(x, x, weight)
