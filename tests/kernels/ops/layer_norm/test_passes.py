"""LayerNorm and RMSNorm kernels against the float64 oracle.

Row lengths cover one of each launch class: shorter than a vector, odd, a full tile, a masked tile, one sweep
with a full last chunk and one without; every other length shares a class with one of them.
"""

from dataclasses import replace
from itertools import product

import fusednorm
import pytest
import torch
import triton.language as tl
from fusednorm import reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.ops.layer_norm import choices
from fusednorm.ops.layer_norm.backward import split as backward_split
from fusednorm.ops.layer_norm.backward.split import LayerNormBackwardSplit
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.forward import resident, split
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit

from tests.kernels.ops.layer_norm.cases import DTYPES, check_backward, check_forward, make_case
from tests.sampling import mark_rest_slow

COLS = (1, 7, 64, 100, 768)
LONG_COLS = (12288, 9001)


@pytest.mark.parametrize(("op", "dtype", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], DTYPES, COLS)))
def test_forward_and_backward_match_the_oracle(op, dtype, cols, device, poisoned):
    case = make_case(op, dtype, 5, cols, device)
    check_forward(case)
    check_backward(case, saved=True)
    check_backward(case, saved=False)


@pytest.mark.parametrize(("op", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], LONG_COLS), together=1))
def test_rows_longer_than_a_tile_match_the_oracle(op, cols, device, poisoned):
    case = make_case(op, torch.float16, 3, cols, device)
    check_forward(case)
    check_backward(case, saved=True)
    check_backward(case, saved=False)


@pytest.mark.parametrize(("op", "block_n"), [("layer_norm", 16), ("layer_norm", 1024), ("rms_norm", 16)])
def test_sums_of_a_long_row_are_those_of_its_parts(op, block_n, device, poisoned, monkeypatch):
    # Ranges of 16 columns are more than the device has programs, each of which then writes its own results.
    config = LayerNormBackwardSplit(256, 1, rows=1, block_n=block_n, num_warps=1, stages=1, programs_per_sm=1)
    monkeypatch.setattr(choices, "choose_backward", lambda *_: config)
    monkeypatch.setattr(backward_split, "SHORTEST_ROW_IN_PARTS", 1024)
    case = make_case(op, torch.bfloat16, 2, 2500, device, residual=True)
    check_backward(case, saved=True)
    check_backward(case, saved=False)
    alone, dy = replace(case, x=case.x[:1], residual=case.residual[:1]), torch.randn_like(case.x)
    assert torch.equal(alone.backward(fusednorm, dy[:1]).dx, case.backward(fusednorm, dy).dx[:1])


@pytest.mark.parametrize(
    ("op", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], [2048, 5001, 8192]), together=1)
)
def test_few_rows_have_the_bits_that_they_have_among_many(op, cols, device, poisoned, monkeypatch):
    many = 2 + int(resident.FEW_PROGRAMS)
    if INTERPRETED:
        many = 4
        monkeypatch.setattr(resident, "FEW_PROGRAMS", tl.constexpr(2))
    case = make_case(op, torch.bfloat16, many, cols, device, activation="relu")
    check_forward(case)
    few = replace(case, x=case.x[:2])
    assert torch.equal(few.forward(fusednorm).y, case.forward(fusednorm).y[:2])


@pytest.mark.parametrize(
    ("op", "of"),
    mark_rest_slow(
        product(("layer_norm", "rms_norm"), ((1024, 4096), (1024, 5000), (3, 8000), (2, 9001))), together=1
    ),
)
def test_rows_taken_in_parts_match_the_oracle(op, of, device, poisoned, monkeypatch):
    max_parts, cols = of
    parts = LayerNormForwardSplit(2, num_warps=2, apply_chunks=1, apply_num_warps=4, rows=2)
    monkeypatch.setattr(choices, "choose_forward", lambda *_, **__: parts)
    monkeypatch.setattr(split, "MAX_PARTS", max_parts)
    for rows, programs in ((1, 2048), (3, 2)):
        monkeypatch.setattr(split, "PARTS_PROGRAMS", programs)
        check_forward(make_case(op, torch.float16, rows, cols, device))
        check_forward(make_case(op, torch.float32, rows, cols, device, residual=True, activation="silu"))


@pytest.mark.parametrize("cols", [768, 700])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_backward_tiles_of_several_blocks_match_the_oracle(op, cols, device, poisoned, monkeypatch):
    tile = LayerNormBackwardTile(2, 256, num_warps=2, stages=3, programs_per_sm=1, holds_weight=True, chunks=3)
    monkeypatch.setattr(choices, "choose_backward", lambda *_, **__: tile)
    case = make_case(op, torch.float32, 7, cols, device, residual=True, activation="silu")
    check_backward(case, saved=True)
    check_backward(case, saved=False)


@pytest.mark.parametrize(("activation", "cols"), mark_rest_slow(product(ACTIVATIONS, [96, 9001]), together=1))
def test_activation_and_residual_match_the_oracle(activation, cols, device, poisoned):
    case = make_case("layer_norm", torch.float32, 3, cols, device, residual=True, activation=activation)
    check_forward(case)
    check_backward(case, saved=False)


@pytest.mark.parametrize(
    ("op", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], [7, 96, 768, 9001]), together=1)
)
def test_a_slope_of_the_callers_choice_matches_the_oracle(op, cols, device, poisoned):
    case = make_case(op, torch.float32, 3, cols, device, activation="leaky_relu", negative_slope=-0.75)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize(
    ("op", "cols"), mark_rest_slow(product(["layer_norm", "rms_norm"], [96, 5000, 9001]), together=1)
)
def test_a_weight_around_zero_matches_the_oracle(op, cols, device, poisoned):
    case = make_case(op, torch.bfloat16, 3, cols, device, activation="silu", weight_offset=1)
    check_forward(case)
    check_backward(case, saved=True)


def test_a_weight_around_zero_loses_nothing_to_its_dtype(device):
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device).bfloat16() / 256
    offset = fusednorm.layer_norm_forward(x, weight, weight_offset=1.0).y
    torch.testing.assert_close(offset, fusednorm.layer_norm_forward(x, 1 + weight.float()).y)


@pytest.mark.parametrize("cols", [1, 30, 256, 9001])
def test_dropout_draws_the_oracles_mask_in_both_passes(cols, device):
    options = {"activation": "silu", "dropout": 0.4, "seed": -(2**40)}
    case = make_case("layer_norm", torch.float32, 3, cols, device, **options)
    actual, exact = case.forward(fusednorm), case.forward(reference, precision=torch.float64)
    assert torch.equal(actual.y == 0, exact.y == 0)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(case.x)
    actual, exact = case.backward(fusednorm, dy), case.backward(reference, dy, precision=torch.float64)
    torch.testing.assert_close(actual.dx, exact.dx.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.dbias, exact.dbias.float(), rtol=1e-5, atol=1e-5)


def test_outside_gradient_of_the_residual_sum_is_added(device):
    case = make_case("layer_norm", torch.float32, 3, 40, device, residual=True)
    dy, outside = torch.randn_like(case.x), torch.randn_like(case.x)
    expected = case.backward(fusednorm, dy).dx + outside
    actual = case.backward(fusednorm, dy, dresidual_out=outside)
    torch.testing.assert_close(actual.dx, expected)
    assert actual.dresidual is actual.dx


@pytest.mark.parametrize("cols", [96, 9001])
@pytest.mark.parametrize(
    ("dtype", "stream"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)],
)
def test_a_residual_stream_keeps_its_dtype(dtype, stream, cols, device, poisoned):
    case = make_case("rms_norm", dtype, 3, cols, device)
    case.residual = torch.randn(3, cols, device=device).to(stream)
    actual, exact = case.forward(fusednorm), case.forward(reference, precision=torch.float64)
    torch.testing.assert_close(actual.y.double(), exact.y.double(), rtol=2**-7, atol=1e-6)
    assert exact.residual_out.dtype == stream
    # One step: the interpreter truncates to bfloat16.
    one_step = {"rtol": torch.finfo(stream).eps, "atol": 1e-6}
    torch.testing.assert_close(actual.residual_out, exact.residual_out, **one_step)
    dy, outside = torch.randn_like(case.x), torch.randn_like(case.residual)
    actual = case.backward(fusednorm, dy, dresidual_out=outside)
    exact = case.backward(reference, dy, dresidual_out=outside, precision=torch.float64)
    assert (actual.dx.dtype, actual.dresidual.dtype) == (dtype, stream)
    scale = float(exact.dx.double().abs().max())
    for gradient, right in ((actual.dx, exact.dx), (actual.dresidual, exact.dresidual)):
        assert gradient.dtype == right.dtype
        error = 1e-6 + torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(gradient.double(), right.double(), rtol=error, atol=scale * 1e-6)


@pytest.mark.parametrize("cols", [33, 9001])
def test_without_parameters(cols, device):
    case = make_case("layer_norm", torch.float32, 3, cols, device, affine=False)
    check_forward(case)
    check_backward(case, saved=False)


def test_parameters_may_have_other_dtypes_than_x(device):
    case = make_case("layer_norm", torch.bfloat16, 4, 64, device)
    case.weight, case.bias = case.weight.float(), case.bias.half()
    actual, exact = case.forward(fusednorm), case.forward(reference, precision=torch.float64)
    assert actual.y.dtype == torch.bfloat16
    torch.testing.assert_close(actual.y.double(), exact.y.double(), rtol=2**-7, atol=2**-7)
    gradients = case.backward(fusednorm, torch.randn_like(case.x))
    assert (gradients.dx.dtype, gradients.dweight.dtype, gradients.dbias.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float16,
    )


def test_output_dtype_is_as_asked(device):
    case = make_case("rms_norm", torch.float16, 2, 64, device, out_dtype=torch.float32)
    exact = case.forward(reference, precision=torch.float64).y
    torch.testing.assert_close(case.forward(fusednorm).y.double(), exact.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cols", [24, 9008])
def test_rows_may_be_strided_views(cols, device):
    wide = torch.randn(4, cols + 9, device=device)
    weight = torch.randn(cols, device=device)
    for view in (wide[:, :cols], wide[::2, 5 : cols + 5], wide[1:2, :cols].expand(3, cols)):
        dy = torch.randn(view.shape[0], 2 * cols, device=device)[:, cols:]
        expected = fusednorm.layer_norm_forward(view.contiguous(), weight).y
        torch.testing.assert_close(fusednorm.layer_norm_forward(view, weight).y, expected)
        expected = fusednorm.layer_norm_backward(dy.contiguous(), view.contiguous(), weight)
        actual = fusednorm.layer_norm_backward(dy, view, weight)
        torch.testing.assert_close(actual.dx, expected.dx)
        torch.testing.assert_close(actual.dweight, expected.dweight)


def test_leading_axes_are_kept(device):
    x = torch.randn(2, 3, 4, 16, device=device)
    result = fusednorm.layer_norm_forward(x, stats=True)
    assert result.y.shape == x.shape
    assert result.mean.shape == result.rstd.shape == x.shape[:-1]
    one_row = fusednorm.layer_norm_forward(x[0, 0, 0], stats=True)
    assert one_row.mean.shape == ()
    assert torch.equal(one_row.y, result.y[0, 0, 0])


def test_no_rows_give_empty_results(device):
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert fusednorm.layer_norm_forward(x, weight, weight).y.shape == (0, 8)
    gradients = fusednorm.layer_norm_backward(x, x, weight, weight)
    assert gradients.dx.shape == (0, 8)
    assert torch.equal(gradients.dweight, torch.zeros_like(weight))
    assert torch.equal(gradients.dbias, torch.zeros_like(weight))


@pytest.mark.parametrize("cols", [48, 9001])
def test_a_rows_bits_do_not_depend_on_its_company(cols, device):
    case = make_case("layer_norm", torch.float16, 7, cols, device)
    together = case.forward(fusednorm).y
    dy = torch.randn_like(case.x)
    dx_together = case.backward(fusednorm, dy).dx
    case.x, dy = case.x[3:4], dy[3:4]
    assert torch.equal(case.forward(fusednorm).y, together[3:4])
    assert torch.equal(case.backward(fusednorm, dy).dx, dx_together[3:4])


def test_nan_and_infinity_stay_in_their_rows(device):
    x = torch.randn(4, 9001, device=device)
    x[1, 7], x[2, 9000] = float("nan"), float("inf")
    y = fusednorm.layer_norm_forward(x, activation="relu").y
    assert torch.isnan(y[1:3]).all()
    assert torch.isfinite(y[[0, 3]]).all()
