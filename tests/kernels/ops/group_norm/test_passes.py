"""GroupNorm kernels against the float64 oracle, every algorithm in both layouts.

Shapes are small, so the algorithms for larger ones are forced: see `group_norm_cases`.  What the grid leaves
out is every pairing of algorithm, dtype and activation; those meet only in the epilogue, which they share.
`make test` runs each algorithm once in a test, and `make test-slow` with each of the other values.
"""

from itertools import product

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm import reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.errors import KernelInputError, UnsupportedShapeError
from fusednorm.results import Backward, Forward

from tests.kernels.ops.group_norm.cases import (
    CHANNELS_LAST,
    CONTIGUOUS,
    check_backward,
    check_forward,
    in_the_other_format,
    make_case,
    use_configuration,
)
from tests.sampling import mark_rest_slow

ALGORITHMS = (*CONTIGUOUS, *CHANNELS_LAST)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    mark_rest_slow(product(ALGORITHMS, (torch.float32, torch.float16, torch.bfloat16)), together=1),
)
def test_both_passes_match_the_oracle(algorithm, dtype, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((2, 4, 8, 10), 2, dtype, device, last)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 1), (3, 30, 7), (2, 3, 5, 5), (1, 4, 2, 3, 2)])
@pytest.mark.parametrize("last", [False, True])
def test_any_spatial_rank_and_odd_sizes(shape, last, device, poisoned):
    case = make_case(shape, 3 if shape[1] % 3 == 0 else 2, torch.float32, device, last and len(shape) > 2)
    if shape[2:] in ((), (1,)):
        # torch refuses one value a channel in training; the oracle does not need it.
        actual, exact = case.forward(ours), case.forward(reference)
        torch.testing.assert_close(actual.y, exact.y, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(case.x)
        torch.testing.assert_close(case.backward(ours, dy).dx, case.backward(reference, dy).dx)
    else:
        check_forward(case)
        check_backward(case)


@pytest.mark.parametrize(
    ("algorithm", "of"), mark_rest_slow(product(ALGORITHMS, ((4, 4), (6, 2), (20, 2), (10, 1))), together=1)
)
def test_any_channels_a_group(algorithm, of, device, poisoned, monkeypatch):
    channels, groups = of
    # 29 positions: prime, so no vector access, and a last tile, split and run that are not full.
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((1, channels, 29), groups, torch.float32, device, last)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize(
    ("algorithm", "activation"), mark_rest_slow(product(("tile", "stream"), ACTIVATIONS), together=1)
)
def test_activation_and_residual(algorithm, activation, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((2, 6, 4, 5), 2, torch.float32, device, last, residual=True, activation=activation)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize("algorithm", ["sweep", "split", "columns"])
def test_activation_and_residual_of_larger_groups(algorithm, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((1, 6, 8, 9), 2, torch.float32, device, last, residual=True, activation="silu")
    check_forward(case)
    check_backward(case)


# The epilogue is one, but each kernel hands the slope on to it.
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_slope_of_the_callers_choice(algorithm, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    options = {"activation": "leaky_relu", "negative_slope": -0.75}
    case = make_case((2, 6, 7, 6), 2, torch.float32, device, last, **options)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropout_draws_the_oracles_mask_in_both_passes(algorithm, device, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    options = {"activation": "silu", "dropout": 0.4, "seed": -(2**40)}
    case = make_case((2, 6, 7, 5), 2, torch.float32, device, last, **options)
    actual, exact = case.forward(ours), case.forward(reference, precision=torch.float64)
    assert torch.equal(actual.y == 0, exact.y == 0)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(case.x)
    actual, exact = case.backward(ours, dy), case.backward(reference, dy, precision=torch.float64)
    torch.testing.assert_close(actual.dx, exact.dx, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.dbias, exact.dbias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_outside_gradient_of_the_residual_sum_is_added(algorithm, device, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((1, 6, 5, 4), 2, torch.float32, device, last, residual=True)
    dy, outside = torch.randn_like(case.x), torch.randn_like(case.x)
    plain = case.backward(ours, dy).dx
    torch.testing.assert_close(case.backward(ours, dy, dresidual_out=outside).dx, plain + outside)


@pytest.mark.parametrize(
    ("algorithm", "given"), mark_rest_slow(product(ALGORITHMS, ("scale", "shift", "both")), together=1)
)
def test_scale_and_shift_of_each_sample(algorithm, given, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((2, 6, 7, 6), 2, torch.float32, device, last, activation="silu")
    halves = dict(zip(("scale", "shift"), torch.randn(2, 12, device=device).chunk(2, dim=1), strict=True))
    extra = halves if given == "both" else {given: halves[given].to(torch.float16)}
    actual = case.forward(ours, **extra)
    exact = case.forward(reference, precision=torch.float64, **extra)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_parameters(algorithm, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((1, 4, 5, 8), 2, torch.float16, device, last, affine=False)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize("last", [False, True])
def test_dtypes_may_be_mixed(last, device, poisoned):
    case = make_case((2, 6, 4, 4), 3, torch.bfloat16, device, last, residual=True)
    case.weight, case.bias, case.residual = case.weight.float(), case.bias.half(), case.residual.float()
    actual = case.forward(ours, out_dtype=torch.float32)
    exact = case.forward(reference, precision=torch.float64, out_dtype=torch.float64)
    torch.testing.assert_close(actual.y.double(), exact.y, rtol=1e-5, atol=1e-5)
    assert actual.residual_out.dtype == torch.bfloat16
    dy = torch.randn_like(case.x).float()
    gradients, exact = case.backward(ours, dy), case.backward(reference, dy, precision=torch.float64)
    for gradient, wanted, tolerance in zip(gradients[:4], exact[:4], (2**-7, 1e-5, 2**-9, 2**-7), strict=True):
        assert gradient.dtype == wanted.dtype
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("positions", [(8, 8), (29,)])
def test_offsets_of_64_bits_inside_a_group(positions, device, poisoned, monkeypatch):
    use_configuration(monkeypatch, "split")
    monkeypatch.setattr("fusednorm.ops.group_norm.sample_shape.WIDE_GROUP", 1)
    case = make_case((1, 6, *positions), 2, torch.float32, device)
    check_forward(case)
    check_backward(case)


def test_many_samples_reduce_their_parameter_gradients_in_two_steps(device, poisoned, monkeypatch):
    monkeypatch.setattr("fusednorm.ops.group_norm.gradient_reductions.REDUCE_TWICE_ABOVE", 16)
    monkeypatch.setattr("fusednorm.ops.group_norm.gradient_reductions.REDUCE_RUNS", 3)
    check_backward(make_case((40, 4, 3), 2, torch.float32, device))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sample_depends_neither_on_the_others_nor_on_what_is_returned(algorithm, device, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((2, 6, 5, 4), 3, torch.float32, device, last)
    whole = case.forward(ours, stats=True).y
    case.x = case.x[1:2]
    assert torch.equal(case.forward(ours).y, whole[1:2])


def test_no_samples_give_empty_results(device):
    case = make_case((0, 4, 3, 3), 2, torch.float32, device)
    assert case.forward(ours, stats=True).y.shape == (0, 4, 3, 3)
    gradients = case.backward(ours, torch.empty_like(case.x))
    assert gradients.dx.shape == (0, 4, 3, 3)
    assert gradients.dweight.tolist() == gradients.dbias.tolist() == [0.0] * 4


def test_tensors_laid_out_otherwise_are_refused(device):
    x = torch.randn(2, 6, 4, 4, device=device)
    with pytest.raises(UnsupportedShapeError, match="contiguous or channels-last"):
        ours.group_norm_forward(x[:, :, ::2], 3)
    with pytest.raises(UnsupportedShapeError, match="residual must be contiguous or channels-last"):
        ours.group_norm_forward(x, 3, residual=x.transpose(2, 3))
    with pytest.raises(UnsupportedShapeError, match="dy must be contiguous or channels-last"):
        ours.group_norm_backward(x.transpose(2, 3), x, 3)
    with pytest.raises(UnsupportedShapeError, match="dresidual_out must be contiguous or channels-last"):
        ours.group_norm_backward(x, x, 3, dresidual_out=x.transpose(2, 3))


# Blocks of the copy that are whole, that end at a vector, and that end between two.
@pytest.mark.parametrize(
    ("shape", "last"),
    mark_rest_slow(product([(2, 6, 5, 9), (1, 64, 8, 8), (1, 72, 10, 10)], (False, True)), together=1),
)
def test_companions_of_the_other_format_give_the_same_bits(last, shape, device, poisoned):
    case = make_case(shape, 2, torch.float32, device, last, residual=True, activation="silu")
    dy, outside = torch.randn_like(case.x), torch.randn_like(case.x)
    residual = case.residual

    def results(dy, residual, outside):
        case.residual = residual
        forward = case.forward(ours, stats=True)
        saved = {"mean": forward.mean, "rstd": forward.rstd}
        gradients = case.backward(ours, dy, dresidual_out=outside, **saved)
        return *forward[:4], *gradients[:3], *case.backward(ours, dy, dresidual_out=outside)[:3]

    expected = results(dy, residual, outside)
    together = tuple(map(in_the_other_format, (dy, residual, outside)))
    singly = (
        (in_the_other_format(dy), residual, outside),
        (dy, in_the_other_format(residual), outside),
        (dy, residual, in_the_other_format(outside)),
    )
    for given in (*(singly if shape[0] == 2 else ()), together):
        for actual, wanted in zip(results(*given), expected, strict=True):
            assert torch.equal(actual, wanted)
            assert actual.stride() == wanted.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_companions_keep_their_dtype_and_what_results_are_written_to(dtype, device, poisoned):
    case = make_case((2, 6, 5, 9), 2, dtype, device, residual=True)
    dy = torch.randn_like(case.x).float()
    wanted = case.forward(ours), case.backward(ours, dy, dresidual_out=case.x)
    case.residual = in_the_other_format(case.residual)
    forward = case.forward(ours, out=Forward(torch.empty_like(case.x), residual_out=torch.empty_like(case.x)))
    dx = torch.empty_like(case.x)
    backward = case.backward(
        ours, in_the_other_format(dy), dresidual_out=in_the_other_format(case.x), out=Backward(dx, None, None)
    )
    assert backward.dx is dx
    for actual, expected in zip((*forward, *backward), (*wanted[0], *wanted[1]), strict=True):
        assert actual is expected is None or torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("algorithm", "affine", "activation"),
    mark_rest_slow(product(ALGORITHMS, (True, False), ("none", "silu")), together=1),
)
def test_scale_and_shift_of_samples_have_gradients(algorithm, affine, activation, device, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    case = make_case((2, 6, 5, 7), 2, torch.float32, device, last, affine=affine, activation=activation)
    dy = torch.randn_like(case.x)
    # Halves of one tensor, as they come out of a projection, and one row for all samples.
    scale, shift = torch.randn(2, 12, device=device).chunk(2, dim=1)
    same = torch.randn(6, device=device).expand(2, 6)
    for given in ({"scale": scale, "shift": shift}, {"scale": same}, {"shift": shift}):
        actual = case.backward(ours, dy, **given)
        exact = case.backward(reference, dy, **given, precision=torch.float64)
        for got, wanted in zip(actual, exact, strict=True):
            if wanted is None:
                assert got is None
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_scale_and_shift_laid_out_otherwise_are_refused(device):
    x = torch.randn(2, 6, 4, device=device)
    own, both = torch.randn(2, 6, device=device), torch.randn(2, 12, device=device)
    with pytest.raises(KernelInputError, match=r"x \[2, 6, 4\] needs scale \[2, 6\]"):
        ours.group_norm_forward(x, 3, scale=both)
    with pytest.raises(UnsupportedShapeError, match="channels of shift must be contiguous"):
        ours.group_norm_forward(x, 3, shift=both[:, ::2])
    with pytest.raises(UnsupportedShapeError, match="one stride from sample to sample"):
        ours.group_norm_forward(x, 3, scale=own, shift=both[:, 6:])
    with pytest.raises(UnsupportedShapeError, match="one stride from sample to sample"):
        ours.group_norm_backward(x, x, 3, scale=own, shift=both[:, 6:])


def test_what_means_nothing_is_refused(device):
    x = torch.randn(2, 6, 4, device=device)
    with pytest.raises(KernelInputError, match="divide C = 6"):
        ours.group_norm_forward(x, 4)
    with pytest.raises(KernelInputError, match="at least one element"):
        ours.group_norm_forward(x[..., :0], 3)
    with pytest.raises(KernelInputError, match=r"x \[2, 6, 4\] needs weight \[6\], got \[4\]"):
        ours.group_norm_forward(x, 3, x[0, :4, 0].contiguous())
    with pytest.raises(KernelInputError, match="must be passed together"):
        ours.group_norm_backward(x, x, 3, mean=torch.zeros(2, 3, device=device))
    with pytest.raises(KernelInputError, match=r"mean must be float32 \[2, 3\]"):
        ours.group_norm_backward(x, x, 3, mean=x, rstd=x)
