"""A scale and a shift for each sample of rows (adaptive LayerNorm and RMSNorm), against the float64 oracle.

Lengths: tiles of several rows and of one row, both with empty lanes, and rows held in registers.
"""

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, UnsupportedShapeError, reference

COLS = (36, 260, 1152, 2050)


def of_samples(x, axes, *, between=False, padded=False):
    """Scale and shift of the first `axes` axes of x; `padded`: as the parts of one wider tensor."""
    shape, cols = x.shape[:axes], x.shape[-1]
    wide = torch.randn(*shape, (6 if padded else 2) * cols, device=x.device)
    made = [wide[..., :cols], wide[..., -cols:]]
    if not padded:
        made = [each.contiguous() for each in made]
    return [each.view(*shape, *(1,) * (x.dim() - 1 - axes), cols) if between else each for each in made]


def check(op, x, scale, shift, *, affine=True, residual=None, **options):
    """Both passes, backward with saved statistics and without."""
    cols = x.shape[-1]
    parameters = [torch.randn(cols, device=x.device) for _ in range(1 if op == "rms_norm" else 2)] if affine else []
    options |= {"scale": scale, "shift": shift, "residual": residual}
    dy = torch.randn(x.shape, device=x.device)
    actual, exact = (
        getattr(library, f"{op}_forward")(x, *parameters, stats=True, **options, **precision)
        for library, precision in ((fusednorm, {}), (reference, {"precision": torch.float64}))
    )
    assert_same(actual, exact)
    saved = {"rstd": actual.rstd} if op == "rms_norm" else {"mean": actual.mean, "rstd": actual.rstd}
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


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_each_sample_has_its_scale_and_shift(op, cols):
    x = torch.randn(3, 5, cols)
    check(op, x, *of_samples(x, 1))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_samples_are_any_leading_axes(axes, affine):
    x = torch.randn(2, 3, 4, 40)
    check("layer_norm", x, *of_samples(x, axes), affine=affine)


@pytest.mark.parametrize("between", [True, False])
def test_parts_of_a_wider_tensor_are_not_copied(between):
    x = torch.randn(2, 3, 4, 40)
    check("layer_norm", x, *of_samples(x, 2, between=between, padded=True))


@pytest.mark.parametrize("given", ["scale", "shift"])
def test_one_of_them_alone(given):
    x = torch.randn(2, 3, 40)
    scale, shift = of_samples(x, 1)
    check("layer_norm", x, scale if given == "scale" else None, shift if given == "shift" else None)


def test_before_activation_and_dropout_with_a_residual():
    x = torch.randn(2, 5, 260)
    options = {"activation": "silu", "dropout": 0.25, "seed": 7, "residual": torch.randn(2, 5, 260)}
    check("layer_norm", x, *of_samples(x, 1), weight_offset=1.0, **options)


def test_rows_with_gaps():
    x = torch.randn(2, 5, 100)[..., :72]
    check("layer_norm", x, *of_samples(x, 1))


def test_no_samples():
    x, scale, shift = torch.randn(0, 5, 40), torch.randn(0, 40), torch.randn(0, 40)
    assert fusednorm.layer_norm_forward(x, scale=scale, shift=shift).y.shape == x.shape
    result = fusednorm.layer_norm_backward(x, x, torch.ones(40), scale=scale, shift=shift)
    assert result.dscale.shape == scale.shape
    assert not result.dweight.any()


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 3, 40), (2, 39), (40, 2)])
def test_a_shape_that_is_not_of_leading_axes(shape):
    x = torch.randn(2, 5, 40)
    with pytest.raises(KernelInputError, match="leading axes"):
        fusednorm.layer_norm_forward(x, scale=torch.randn(shape))


def test_scale_and_shift_of_different_samples():
    x = torch.randn(2, 5, 40)
    with pytest.raises(KernelInputError, match="one shape"):
        fusednorm.layer_norm_forward(x, scale=torch.randn(2, 40), shift=torch.randn(2, 5, 40))


def test_parameters_of_heads_have_no_samples():
    x = torch.randn(2, 5, 3, 40)
    with pytest.raises(KernelInputError, match="each head"):
        fusednorm.layer_norm_forward(x, torch.randn(3, 40), scale=torch.randn(2, 40))


def test_float8_has_no_samples():
    x = torch.randn(2, 5, 40)
    with pytest.raises(UnsupportedShapeError, match="float8"):
        fusednorm.layer_norm_forward(x, scale=torch.randn(2, 40), out_dtype=torch.float8_e4m3fn)


def test_rows_too_long_for_a_tile_are_refused_in_backward():
    x = torch.randn(1, 2, 16400)
    with pytest.raises(UnsupportedShapeError):
        fusednorm.layer_norm_backward(x, x, scale=torch.randn(1, 16400))
