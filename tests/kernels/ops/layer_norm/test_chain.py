"""Several LayerNorms in one pass against the float64 oracle.

Row lengths cover a tile of several rows, one and several chunks that are held, full and masked, and a sweep; the
numbers of norms, both directions in which a sweep ends.
"""

from itertools import product

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError, UnsupportedShapeError, layer_norm_chain
from fusednorm.reference import chain as reference_chain

from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.kernels.ops.layer_norm.cases import DTYPES
from tests.sampling import mark_rest_slow

COLS = (1, 7, 64, 100, 768, 1200)
SWEPT = 17001
"""Columns of a row too long to hold."""


def make_chain(dtype, rows, cols, norms, device):
    """x, weights and biases; some of either absent."""

    def parameters(absent):
        return [None if i % 3 == absent else torch.randn(cols, device=device).to(dtype) for i in range(norms)]

    x = (torch.randn(rows, cols, device=device) * 2 + 1).to(dtype)
    return x, parameters(2), parameters(1)


def torch_chain(x, weights, biases):
    for weight, bias in zip(weights, biases, strict=True):
        x = F.layer_norm(x, x.shape[-1:], weight, bias)
    return x


def check(x, weights, biases, **options):
    actual = layer_norm_chain(x, weights, biases, **options)
    exact = reference_chain.layer_norm_chain(x, weights, biases, out_dtype=torch.float64, precision=torch.float64)
    assert_close_to_oracle(actual, exact, torch_chain(x, weights, biases), "y")


@pytest.mark.parametrize(("dtype", "cols", "norms"), mark_rest_slow(product(DTYPES, COLS, (1, 2, 4))))
def test_rows_that_are_held_match_the_oracle(dtype, cols, norms, device, poisoned):
    check(*make_chain(dtype, 5, cols, norms, device))


@pytest.mark.parametrize("norms", [1, 2, 3])
@pytest.mark.parametrize("cols", [SWEPT, 20480])
def test_rows_that_are_swept_match_the_oracle(cols, norms, device, poisoned):
    check(*make_chain(torch.float16, 2, cols, norms, device))


def test_eight_norms_match_the_oracle(device):
    check(*make_chain(torch.float32, 2, 40, 8, device))


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_nothing_is_rounded_between_norms(cols, device):
    x, weights, biases = make_chain(torch.float16, 2, cols, 3, device)
    exact = reference_chain.layer_norm_chain(x, weights, biases, out_dtype=torch.float64, precision=torch.float64)
    assert_close_to_oracle(layer_norm_chain(x, weights, biases), exact, exact, noise=1e-5)


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_large_means_do_not_cancel_in_any_norm(cols, device):
    x, weights, biases = make_chain(torch.float32, 2, cols, 2, device)
    check(x + 1e4, weights, [torch.full((cols,), 1e3, device=device), *biases[1:]])


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_without_parameters(cols, device):
    # A mean that makes the columns beyond the row's end large after the first norm, if they counted in the second.
    x = torch.randn(2, cols, device=device) + 1e4
    check(x, [None, None], [None, None])
    assert torch.equal(layer_norm_chain(x, [None] * 2), layer_norm_chain(x, [None] * 2, [None] * 2))


@pytest.mark.parametrize("cols", [100, 768])
def test_one_norm_is_the_forward_pass(cols, device):
    x, weights, biases = make_chain(torch.float32, 3, cols, 1, device)
    expected = fusednorm.layer_norm_forward(x, *weights, *biases, eps=0.1).y
    torch.testing.assert_close(layer_norm_chain(x, weights, biases, eps=0.1), expected)


def test_parameters_and_output_may_have_other_dtypes_than_x(device):
    x, weights, biases = make_chain(torch.bfloat16, 3, 64, 2, device)
    weights, biases = [weights[0].float(), weights[1].half()], [biases[0].half(), None]
    y = layer_norm_chain(x, weights, biases, out_dtype=torch.float32)
    exact = reference_chain.layer_norm_chain(x, weights, biases, out_dtype=torch.float64, precision=torch.float64)
    torch.testing.assert_close(y, exact.float(), rtol=1e-5, atol=1e-5)
    assert layer_norm_chain(x, weights, biases).dtype == torch.bfloat16


@pytest.mark.parametrize("cols", [24, 17008])
def test_rows_may_be_strided_views(cols, device):
    wide = torch.randn(4, cols + 9, device=device)
    weights = [torch.randn(cols, device=device)] * 2
    for view in (wide[:, :cols], wide[::2, 5 : cols + 5], wide[1:2, :cols].expand(2, cols)):
        torch.testing.assert_close(layer_norm_chain(view, weights), layer_norm_chain(view.contiguous(), weights))


@pytest.mark.parametrize("cols", [48, SWEPT])
def test_a_rows_bits_do_not_depend_on_its_company(cols, device):
    x, weights, biases = make_chain(torch.float16, 4, cols, 2, device)
    together = layer_norm_chain(x, weights, biases)
    assert torch.equal(layer_norm_chain(x[2:3], weights, biases), together[2:3])


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_nan_and_infinity_stay_in_their_rows(cols, device):
    x = torch.randn(4, cols, device=device)
    x[1, 7], x[2, cols - 1] = float("nan"), float("inf")
    y = layer_norm_chain(x, [None, None])
    assert torch.isnan(y[1:3]).all()
    assert torch.isfinite(y[[0, 3]]).all()


def test_the_result_is_written_where_it_is_wanted(device):
    x, weights, biases = make_chain(torch.float16, 3, 48, 2, device)
    expected = layer_norm_chain(x, weights, biases, out_dtype=torch.float32)
    for _ in range(2):
        place = torch.full_like(expected, float("nan"))
        y = layer_norm_chain(x, weights, biases, out_dtype=torch.float32, out=place)
        assert y is place
        assert torch.equal(place, expected)


def test_a_place_that_does_not_fit_is_refused(device):
    x = torch.randn(2, 8, device=device)
    for place in (torch.empty(3, 8, device=device), torch.empty(2, 8, device=device).half()):
        with pytest.raises(KernelInputError, match=r"out\.y must be"):
            layer_norm_chain(x, [None], out=place)


def test_leading_axes_are_kept(device):
    x = torch.randn(2, 3, 4, 16, device=device)
    y = layer_norm_chain(x, [None, None])
    assert y.shape == x.shape
    assert torch.equal(layer_norm_chain(x[0, 0, 0], [None, None]), y[0, 0, 0])
    assert layer_norm_chain(x[:0], [None]).shape == (0, 3, 4, 16)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([], {}, "weights must hold 1 to 8 norms, got 0"),
        ([None] * 9, {}, "weights must hold 1 to 8 norms, got 9"),
        ([None] * 2, {"biases": [None]}, "biases must be as many as weights, 2, got 1"),
        ([None, torch.ones(7)], {}, r"x \[\d+, 8\] needs weights\[1\] \[8\], got \[7\]"),
        ([None], {"biases": [torch.ones(8).int()]}, r"biases\[0\] must be float32, float16 or bfloat16"),
        ([None], {"eps": -1.0}, "eps must be at least 0 and finite"),
        ([None], {"out_dtype": torch.float8_e4m3fn}, "out_dtype must be float32, float16 or bfloat16, got"),
        ([torch.ones(8, requires_grad=True)], {}, "layer_norm_chain has no derivative"),
    ],
)
def test_bad_arguments_are_refused_by_name(weights, options, message, device):
    def move(tensors):
        return [None if t is None else t.to(device) for t in tensors]

    options = options | ({"biases": move(options["biases"])} if "biases" in options else {})
    with pytest.raises(KernelInputError, match=message):
        layer_norm_chain(torch.randn(2, 8, device=device), move(weights), **options)


def test_what_requires_a_gradient_is_taken_where_none_is_recorded(device):
    x, weight = torch.randn(2, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(layer_norm_chain(x, [weight]), F.layer_norm(x, (8,)))
    with pytest.raises(UnsupportedShapeError, match="contiguous along its last axis"):
        layer_norm_chain(torch.randn(2, 8, device=device).t(), [None])
