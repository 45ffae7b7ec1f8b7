"""LayerNorm and RMSNorm into float8 with a scale for each row, against the float64 oracle.

Row lengths cover a tile of several rows, one and several chunks that are held, full and masked, and a sweep.
"""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.tensors.arrays import FLOAT8

from tests.kernels.harness.accuracy import assert_float8_close_to_oracle
from tests.kernels.ops.layer_norm.cases import DTYPES, make_case
from tests.sampling import mark_rest_slow

COLS = (1, 7, 64, 100, 768, 1200)
SWEPT = 17001
"""Columns of a row too long to hold."""


def check(case, **margin):
    actual = case.forward(fusednorm, stats=True, out_dtype=FLOAT8)
    exact = case.forward(reference, stats=True, out_dtype=torch.float64, precision=torch.float64)
    in_float32 = case.torch_forward(*(None if t is None else t.float() for t in case.torch_leaves()))
    assert_float8_close_to_oracle(actual.y, actual.y_scale, exact.y, in_float32.detach(), **margin)
    torch.testing.assert_close(actual.rstd.double(), exact.rstd, rtol=2e-6, atol=0)
    if case.residual is None:
        assert actual.residual_out is None
    else:
        torch.testing.assert_close(actual.residual_out, case.x + case.residual)


@pytest.mark.parametrize(("op", "dtype", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], DTYPES, COLS)))
def test_rows_that_are_held_match_the_oracle(op, dtype, cols, device, poisoned):
    check(make_case(op, dtype, 5, cols, device))


@pytest.mark.parametrize("cols", [SWEPT, 24576])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_that_are_swept_match_the_oracle(op, cols, device, poisoned):
    check(make_case(op, torch.float16, 2, cols, device))


@pytest.mark.parametrize(("activation", "cols"), mark_rest_slow(product(ACTIVATIONS, [96, SWEPT]), together=1))
def test_activation_and_residual_match_the_oracle(activation, cols, device, poisoned):
    check(make_case("layer_norm", torch.float32, 2, cols, device, residual=True, activation=activation))


@pytest.mark.parametrize("cols", [30, SWEPT])
def test_without_parameters(cols, device):
    # A mean that makes the columns beyond the row's end its largest, if they counted.
    case = make_case("layer_norm", torch.float32, 2, cols, device, affine=False)
    case.x += 100
    check(case)


@pytest.mark.parametrize("cols", [1, 30, 1200, SWEPT])
def test_dropout_comes_before_the_scale(cols, device):
    case = make_case("layer_norm", torch.float32, 2, cols, device, activation="silu", dropout=0.4, seed=-(2**40))
    actual = case.forward(fusednorm, out_dtype=FLOAT8)
    exact = case.forward(reference, out_dtype=torch.float64, precision=torch.float64).y
    assert_float8_close_to_oracle(actual.y, actual.y_scale, exact, exact, noise=1e-5)


@pytest.mark.parametrize("cols", [500, SWEPT])
def test_large_mean_does_not_cancel(cols, device):
    case = make_case("layer_norm", torch.float32, 2, cols, device)
    case.x += 1e4
    check(case)


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_a_rows_largest_value_is_the_types_largest(cols, device):
    case = make_case("layer_norm", torch.bfloat16, 3, cols, device)
    y, _, _, _, scale = case.forward(fusednorm, out_dtype=FLOAT8)
    assert torch.equal(y.float().abs().amax(-1), torch.full((3,), 448.0, device=device))
    wide = case.forward(fusednorm, out_dtype=torch.float32).y
    torch.testing.assert_close(scale, wide.abs().amax(-1) / 448)


@pytest.mark.parametrize("cols", [1, 100, SWEPT])
def test_rows_of_zeros_stay_zero(cols, device):
    result = fusednorm.layer_norm_forward(torch.full((2, cols), 3.0, device=device), out_dtype=FLOAT8)
    assert torch.equal(result.y.float(), torch.zeros(2, cols, device=device))
    assert result.y_scale.tolist() == [2.0**-126] * 2


@pytest.mark.parametrize("cols", [100, SWEPT])
def test_nan_and_infinity_leave_nothing_finite_in_their_rows(cols, device):
    x = torch.randn(4, cols, device=device)
    x[1, 7], x[2, cols - 1] = float("nan"), float("inf")
    result = fusednorm.layer_norm_forward(x, activation="relu", out_dtype=FLOAT8)
    assert torch.isnan(result.y[1:3].float()).all()
    assert torch.isnan(result.y_scale[1:3]).all()
    assert torch.isfinite(result.y.float()[[0, 3]]).all()
    weight = torch.ones(cols, device=device)
    weight[5] = float("inf")
    result = fusednorm.rms_norm_forward(x[:1], weight, out_dtype=FLOAT8)
    assert not torch.isfinite(result.y.float() * result.y_scale).any()


@pytest.mark.parametrize("cols", [24, 17008])
def test_rows_may_be_strided_views(cols, device):
    wide = torch.randn(6, cols + 9, device=device)
    weight = torch.randn(cols, device=device)
    for view in (wide[:, :cols], wide[::2, 5 : cols + 5], wide[1:2, :cols].expand(2, cols)):
        expected = fusednorm.rms_norm_forward(view.contiguous(), weight, out_dtype=FLOAT8)
        actual = fusednorm.rms_norm_forward(view, weight, out_dtype=FLOAT8)
        torch.testing.assert_close(actual.y_scale, expected.y_scale)
        torch.testing.assert_close(actual.y.float(), expected.y.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("cols", [48, SWEPT])
def test_a_rows_bits_do_not_depend_on_its_company(cols, device):
    case = make_case("layer_norm", torch.float16, 4, cols, device)
    together = case.forward(fusednorm, out_dtype=FLOAT8)
    case.x = case.x[2:3]
    alone = case.forward(fusednorm, out_dtype=FLOAT8)
    assert torch.equal(alone.y.view(torch.uint8), together.y[2:3].view(torch.uint8))
    assert torch.equal(alone.y_scale, together.y_scale[2:3])


def test_leading_axes_are_kept_and_scale_comes_with_float8_alone(device):
    x = torch.randn(2, 3, 4, 16, device=device)
    assert fusednorm.layer_norm_forward(x).y_scale is None
    result = fusednorm.layer_norm_forward(x, out_dtype=FLOAT8)
    assert (result.y.shape, result.y_scale.shape) == (x.shape, x.shape[:-1])
    assert fusednorm.layer_norm_forward(x[0, 0, 0], out_dtype=FLOAT8).y_scale.shape == ()
    empty = fusednorm.layer_norm_forward(x[:0], out_dtype=FLOAT8)
    assert (empty.y.shape, empty.y_scale.shape) == ((0, 3, 4, 16), (0, 3, 4))


def test_float8_is_an_output_of_rows_alone(device):
    x = torch.randn(2, 8, device=device)
    with pytest.raises(KernelInputError, match="x must be float32, float16 or bfloat16, got float8_e4m3fn"):
        fusednorm.layer_norm_forward(x.to(FLOAT8))
    for library in (fusednorm, reference):
        with pytest.raises(KernelInputError, match="out_dtype must be float32, float16 or bfloat16, got"):
            library.group_norm_forward(x, 2, out_dtype=FLOAT8)
