"""A scale, shift and gate for each sample of rows (adaptive LayerNorm and RMSNorm), against the float64 oracle.

Lengths: tiles of several rows and of one row, both with empty lanes, rows held in registers, and rows that the
forward pass sweeps and the backward pass splits into ranges of columns.
"""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, UnsupportedShapeError, reference
from fusednorm.ops.layer_norm.choices import MOST_COLS_WITH_GATE
from fusednorm.tensors.arrays import FLOAT8

from tests.kernels.harness.accuracy import assert_float8_close_to_oracle
from tests.sampling import mark_rest_slow

COLS = (36, 260, 1152, 2050)
LONG = 17001
NAMES = ("scale", "shift", "gate")


def of_samples(x, axes, names=NAMES, *, between=False, padded=False, dtype=torch.float32):
    """Tensors of the first `axes` axes of x by name; `padded`: as parts of one wider tensor."""
    shape, cols = x.shape[:axes], x.shape[-1]
    made = torch.randn(*shape, 6 * cols, dtype=dtype, device=x.device).chunk(6, -1)[1 : 1 + len(names)]
    if not padded:
        made = [each.contiguous() for each in made]
    wide = (*shape, *(1,) * (x.dim() - 1 - axes), cols)
    return {name: each.view(wide) if between else each for name, each in zip(names, made, strict=True)}


def check(op, x, modulations, *, affine=True, rtol=1e-5, atol=2e-5, **options):
    """Both passes, backward with saved statistics and without; a gate comes with a residual."""

    def like(shape):
        return torch.randn(shape, dtype=x.dtype, device=x.device)

    parameters = [like(x.shape[-1:]) for _ in range(1 if op == "rms_norm" else 2)] if affine else []
    options |= modulations
    of_backward = {}
    if "gate" in modulations:
        options.setdefault("residual", like(x.shape))
        of_backward["dresidual_out"] = like(x.shape)
    dy = like(x.shape)
    actual, exact = (
        getattr(library, f"{op}_forward")(x, *parameters, stats=True, **options, **precision)
        for library, precision in ((fusednorm, {}), (reference, {"precision": torch.float64}))
    )
    assert_same(actual, exact, rtol, atol)
    saved = {"rstd": actual.rstd} if op == "rms_norm" else {"mean": actual.mean, "rstd": actual.rstd}
    options |= of_backward
    run = getattr(fusednorm, f"{op}_backward")
    exact = getattr(reference, f"{op}_backward")(dy, x, *parameters, **options, precision=torch.float64)
    assert_same(run(dy, x, *parameters, **options), exact, rtol, atol)
    assert_same(run(dy, x, *parameters, **options, **saved), exact, rtol, atol)


def assert_same(actual, exact, rtol, atol):
    for name, right in exact._asdict().items():
        got = getattr(actual, name)
        assert (got is None) == (right is None), name
        if right is not None:
            assert got.shape == right.shape, name
            torch.testing.assert_close(
                got.float(), right.float(), rtol=rtol, atol=atol * float(right.abs().max() + 1), msg=name
            )


@pytest.mark.parametrize(
    ("cols", "of"),
    mark_rest_slow(
        product(COLS, [("layer_norm", NAMES), ("layer_norm", NAMES[:2]), ("rms_norm", NAMES)]), together=1
    ),
)
def test_each_sample_has_its_own(cols, of, poisoned, device):
    op, names = of
    x = torch.randn(2, 3, cols, device=device)
    check(op, x, of_samples(x, 1, names))


@pytest.mark.parametrize(("op", "names"), [("layer_norm", NAMES[:2]), ("rms_norm", NAMES)])
def test_rows_too_long_for_a_tile(op, names, poisoned, device):
    x = torch.randn(2, 2, LONG, device=device)
    check(op, x, of_samples(x, 1, names), activation="silu")


def test_long_rows_in_16_bits_with_a_gate(device):
    x = torch.randn(2, 1, MOST_COLS_WITH_GATE + 8, device=device, dtype=torch.bfloat16)
    check("rms_norm", x, of_samples(x, 1, ("gate",), dtype=x.dtype), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("dtype", "cols", "name", "is_split"),
    [
        (torch.bfloat16, MOST_COLS_WITH_GATE + 8, "gate", True),
        (torch.bfloat16, MOST_COLS_WITH_GATE + 8, "scale", False),
        (torch.bfloat16, MOST_COLS_WITH_GATE, "gate", False),
        (torch.float32, MOST_COLS_WITH_GATE, "gate", False),
    ],
)
def test_only_long_rows_in_16_bits_are_split_for_a_gate(dtype, cols, name, is_split, plans, device):
    x = torch.randn(2, 1, cols, device=device, dtype=dtype)
    fusednorm.rms_norm_backward(x, x, residual=x, **of_samples(x, 1, (name,), dtype=dtype))
    (first, *_) = plans[0]
    assert first.kernel.fn.__name__.startswith("layer_norm_backward_split") == is_split


@pytest.mark.parametrize(("axes", "affine"), mark_rest_slow(product([0, 1, 2, 3], [True, False]), together=1))
def test_samples_are_any_leading_axes(axes, affine, device):
    x = torch.randn(2, 3, 4, 40, device=device)
    check("layer_norm", x, of_samples(x, axes), affine=affine)


@pytest.mark.parametrize("between", [True, False])
def test_parts_of_a_wider_tensor_are_not_copied(between, device):
    x = torch.randn(2, 3, 4, 40, device=device)
    check("layer_norm", x, of_samples(x, 2, between=between, padded=True))


@pytest.mark.parametrize(
    ("name", "cols"), [*((name, cols) for name in NAMES for cols in (40, 2050)), ("gate", LONG)]
)
def test_one_of_them_alone(name, cols, device):
    x = torch.randn(2, 3, cols, device=device)
    check("layer_norm", x, of_samples(x, 1, (name,)), affine=cols != 40)


def test_before_activation_and_dropout_with_a_residual(device):
    x, residual = torch.randn(2, 2, 5, 260, device=device)
    options = {"activation": "silu", "dropout": 0.25, "seed": 7, "residual": residual}
    check("layer_norm", x, of_samples(x, 1), weight_offset=1.0, **options)


@pytest.mark.parametrize("cols", [72, 2050, LONG])
def test_types_are_mixed(cols, device):
    x = torch.randn(2, 2, cols, device=device).to(torch.bfloat16)
    dtypes = zip(NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True)
    modulations = {name: torch.randn(2, 6 * cols, device=device).to(dtype)[:, :cols] for name, dtype in dtypes}
    check("layer_norm", x, modulations, rtol=1e-2, atol=1e-2)


def test_without_a_gate_a_residual_of_xs_dtype_has_xs_gradient(device):
    x = torch.randn(2, 3, 40, device=device)
    result = fusednorm.layer_norm_backward(x, x, residual=x, scale=torch.randn(2, 40, device=device))
    assert result.dresidual is result.dx
    result = fusednorm.layer_norm_backward(x, x, residual=x, gate=torch.randn(2, 40, device=device))
    assert result.dresidual is not result.dx


@pytest.mark.parametrize("cols", [72, LONG])
def test_rows_with_gaps(cols, device):
    x = torch.randn(2, 1, cols + 28, device=device)[..., :cols]
    check("layer_norm", x, of_samples(x, 1))


@pytest.mark.parametrize("cols", [40, 2050, LONG])
def test_nan_stays_in_its_sample(cols, device):
    x = torch.randn(3, 2, cols, device=device)
    modulations = of_samples(x, 1)
    call = {"residual": torch.randn(x.shape, device=device), **modulations}
    for name, at in (("scale", 0), ("gate", 1)):
        modulations[name][at, 0] = torch.nan
    forward = fusednorm.layer_norm_forward(x, **call)
    backward = fusednorm.layer_norm_backward(x, x, **call)
    for each in (forward.y, forward.residual_out, backward.dx, backward.dresidual, backward.dgate, backward.dscale):
        assert torch.isfinite(each[2]).all()
    assert torch.isnan(forward.y[0, :, 0]).all()
    assert torch.isfinite(forward.y[0, :, 1:]).all()
    assert torch.isnan(forward.y[1]).all()


@pytest.mark.parametrize("cols", [260, LONG])
def test_a_large_mean_does_not_cancel(cols, device):
    x = torch.randn(2, 3, cols, device=device)
    modulations = of_samples(x, 1, ("scale", "shift"))
    residual = torch.randn(x.shape, device=device) + 1e4
    modulations["gate"] = torch.ones(2, cols, device=device)
    actual = fusednorm.layer_norm_forward(x, residual=residual, **modulations)
    exact = reference.layer_norm_forward(
        (x + residual).double() - 1e4, scale=modulations["scale"], shift=modulations["shift"]
    )
    torch.testing.assert_close(actual.y.double(), exact.y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cols", [260, LONG])
def test_every_run_gives_the_same_bits_for_any_number_of_samples(cols, device):
    x, residual = torch.randn(2, 3, 2, cols, device=device)
    modulations = of_samples(x, 1)
    call = {"residual": residual, **modulations}
    first, again = (fusednorm.layer_norm_forward(x, **call) for _ in range(2))
    alone = fusednorm.layer_norm_forward(
        x[1:2], residual=residual[1:2], **{name: each[1:2] for name, each in modulations.items()}
    )
    assert torch.equal(first.y, again.y)
    assert torch.equal(first.y[1:2], alone.y)
    first, again = (fusednorm.layer_norm_backward(x, x, torch.ones(cols, device=device), **call) for _ in range(2))
    for name, each in first._asdict().items():
        assert each is None or torch.equal(each, getattr(again, name)), name


@pytest.mark.parametrize(
    ("names", "cols"), mark_rest_slow(product([NAMES, NAMES[:2]], [64, 1200, LONG]), together=1)
)
def test_a_float8_result(cols, names, device):
    x = torch.randn(2, 3, cols, device=device)
    call = of_samples(x, 1, names, padded=True)
    if "gate" in names:
        call["residual"] = torch.randn(x.shape, device=device)
    weight = torch.randn(cols, device=device)
    actual = fusednorm.layer_norm_forward(x, weight, out_dtype=FLOAT8, activation="silu", **call)
    in_float32 = reference.layer_norm_forward(x, weight, activation="silu", **call)
    exact = reference.layer_norm_forward(
        x, weight, activation="silu", precision=torch.float64, out_dtype=torch.float64, **call
    )
    assert_float8_close_to_oracle(actual.y, actual.y_scale, exact.y, in_float32.y)


def test_no_samples(device):
    x = torch.randn(0, 5, 40, device=device)
    modulations = of_samples(x, 1)
    assert fusednorm.layer_norm_forward(x, residual=x, **modulations).y.shape == x.shape
    result = fusednorm.layer_norm_backward(x, x, torch.ones(40, device=device), residual=x, **modulations)
    assert result.dscale.shape == result.dgate.shape == (0, 40)
    assert not result.dweight.any()


def test_samples_without_rows(device):
    x = torch.randn(2, 0, 40, device=device)
    result = fusednorm.layer_norm_backward(x, x, torch.ones(40, device=device), residual=x, **of_samples(x, 1))
    assert not any(each.any() for each in (result.dscale, result.dshift, result.dgate))


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 3, 40), (2, 39), (40, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_is_not_of_leading_axes(name, shape, device):
    x = torch.randn(2, 5, 40, device=device)
    with pytest.raises(KernelInputError, match=f"needs {name} .* leading axes"):
        fusednorm.layer_norm_forward(x, residual=x, **{name: torch.randn(shape, device=device)})


def test_tensors_of_different_samples(device):
    x = torch.randn(2, 5, 40, device=device)
    with pytest.raises(KernelInputError, match="scale and gate must have one shape"):
        fusednorm.layer_norm_forward(x, residual=x, scale=x[:, 0], gate=x)


def test_tensors_of_different_strides_are_refused(device):
    x = torch.randn(2, 5, 40, device=device)
    with pytest.raises(UnsupportedShapeError, match="shift and gate must have one stride"):
        fusednorm.layer_norm_forward(x, residual=x, shift=torch.randn(2, 40, device=device), gate=x[:, 0])


def test_a_gate_needs_a_residual(device):
    x = torch.randn(2, 5, 40, device=device)
    with pytest.raises(KernelInputError, match="gate needs a residual"):
        fusednorm.layer_norm_forward(x, gate=torch.randn(2, 40, device=device))
    with pytest.raises(KernelInputError, match="gate needs a residual"):
        fusednorm.layer_norm_backward(x, x, gate=torch.randn(2, 40, device=device))


def test_parameters_of_heads_have_no_samples(device):
    x = torch.randn(2, 5, 3, 40, device=device)
    with pytest.raises(KernelInputError, match="each head"):
        fusednorm.layer_norm_forward(x, torch.randn(3, 40, device=device), scale=torch.randn(2, 40, device=device))
