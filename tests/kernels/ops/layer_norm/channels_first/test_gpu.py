"""Norms over channels at the sizes of image models, on a GPU: accuracy, determinism, more than 2^31 elements."""

from dataclasses import replace

import fusednorm
import pytest
import torch
from fusednorm import reference
from fusednorm.arguments.checks import ACTIVATIONS

from tests.kernels.harness.misaligned import misaligned
from tests.kernels.ops.layer_norm.cases import DTYPES, Case, check_backward, check_forward
from tests.kernels.ops.layer_norm.channels_first.test_passes import check, make_samples

pytestmark = pytest.mark.gpu

# Accesses of 16, 8 and fewer bytes; a few positions, and channels that are read twice.
SHAPES = (
    (2, 96, 256, 256),
    (8, 128, 56, 56),
    (8, 192, 48, 48),
    (16, 512, 14, 14),
    (16, 768, 7, 7),
    (33, 1024, 7, 7),
    (4, 2048, 14, 14),
    (5, 3, 1001),
    (3, 17, 9, 3),
    (300, 100, 1, 1),
    (2, 3000, 10, 10),
    (3, 2500, 7, 7),
    (1, 100_003, 33),
)


class ChannelCase(Case):
    """Inputs of passes over channels, and what torch makes of the same rows."""

    def torch_forward(self, x, weight, bias, residual):
        rows = [None if each is None else each.movedim(1, -1) for each in (x, residual)]
        return super().torch_forward(rows[0], weight, bias, rows[1]).movedim(-1, 1)


def make_case(op, shape, dtype, device, channels_last=False, residual=False, **options):
    x = make_samples(shape, device, channels_last) * 2 + 1
    weight, bias = torch.randn(2, shape[1], device=device).to(dtype)
    added = make_samples(shape, device, channels_last, dtype) if residual else None
    options |= {"layout": "nchw"}
    return ChannelCase(op, x.to(dtype), weight, bias if op == "layer_norm" else None, added, options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_samples_match_the_oracle(op, shape, dtype, channels_last, device, poisoned):
    case = make_case(op, shape, dtype, device, channels_last)
    check_forward(case)
    check_backward(case, saved=True)
    check_backward(case, saved=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 96, 28, 28), (4, 1024, 7, 7), (2, 1100, 14, 14), (1, 5000, 6, 6)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_residual_match_the_oracle(activation, shape, dtype, device, poisoned):
    case = make_case("layer_norm", shape, dtype, device, residual=True, activation=activation)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("names", [("scale", "shift"), ("gate",), ("scale", "shift", "gate")])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 384, 14, 14), (3, 96, 64, 64), (5, 768, 7, 7), (2, 2100, 9, 9), (70, 64, 3)])
def test_each_sample_has_its_own_parameters(shape, dtype, channels_last, names, device, poisoned):
    x, residual, dresidual_out = (make_samples(shape, device, channels_last, dtype) for _ in range(3))
    parts = torch.randn(shape[0], 3 * shape[1], device=device).to(dtype).chunk(3, 1)
    options = dict(zip(names, parts, strict=False)) | {"activation": "silu", "dropout": 0.25, "seed": 2**40}
    if "gate" in names:
        options |= {"residual": residual, "dresidual_out": dresidual_out}
    check("layer_norm", x, **options)


@pytest.mark.parametrize("given", ["x", "dy", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 96, 32, 32), (4, 320, 14, 14), (2, 2100, 8, 8)])
def test_misaligned_tensors_give_the_results_of_aligned_ones(shape, dtype, given, device, poisoned):
    case = make_case("layer_norm", shape, dtype, device, residual=True)
    dy = torch.randn_like(case.x)
    wanted = case.forward(fusednorm, stats=True), case.backward(fusednorm, dy)
    moved = misaligned(shape, dtype, device)
    moved.copy_(dy if given == "dy" else getattr(case, given))
    other = case if given == "dy" else replace(case, **{given: moved})
    found = other.forward(fusednorm, stats=True), other.backward(fusednorm, moved if given == "dy" else dy)
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    for results, right in zip(found, wanted, strict=True):
        for name, each in right._asdict().items():
            got = getattr(results, name)
            assert (got is None) == (each is None), name
            if each is not None:
                scale = float(each.float().abs().max())
                torch.testing.assert_close(got.float() / scale, each.float() / scale, **tolerance, msg=name)


@pytest.mark.parametrize("shape", [(16, 96, 56, 56), (16, 768, 7, 7), (4, 2100, 14, 14)])
def test_every_run_gives_the_same_bits_for_any_number_of_samples(shape, device):
    case = make_case("layer_norm", shape, torch.bfloat16, device, activation="silu")
    dy = torch.randn_like(case.x)
    forward, backward = case.forward(fusednorm, stats=True), case.backward(fusednorm, dy)
    # Planned, and replayed.
    for _ in range(3):
        for first, again in zip(forward, case.forward(fusednorm, stats=True), strict=True):
            assert first is again is None or torch.equal(first, again)
        for first, again in zip(backward, case.backward(fusednorm, dy), strict=True):
            assert first is again is None or torch.equal(first, again)
    alone = replace(case, x=case.x[1:2])
    assert torch.equal(alone.forward(fusednorm).y, forward.y[1:2])
    assert torch.equal(alone.backward(fusednorm, dy[1:2]).dx, backward.dx[1:2])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 64, 33, 31), (3, 2100, 5, 7)])
def test_dropout_draws_the_oracles_mask(shape, channels_last, device):
    case = make_case("layer_norm", shape, torch.float32, device, channels_last, dropout=0.3, seed=2**50 + 1)
    assert torch.equal(case.forward(fusednorm).y == 0, case.forward(reference).y == 0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_float8_of_adjacent_channels_only(channels_last, device):
    case = make_case("layer_norm", (8, 384, 14, 14), torch.bfloat16, device, channels_last)
    if not channels_last:
        with pytest.raises(fusednorm.UnsupportedShapeError, match="channels_last"):
            case.forward(fusednorm, out_dtype=torch.float8_e4m3fn)
        return
    result, right = case.forward(fusednorm, out_dtype=torch.float8_e4m3fn), case.forward(fusednorm)
    y = result.y.float() * result.y_scale[:, None]
    torch.testing.assert_close(y, right.y.float(), rtol=0.07, atol=0.02)


@pytest.mark.parametrize("shape", [(70_000, 512, 8, 8), (1, 64, 2**25 + 88), (1, 2**21, 1025)])
def test_more_than_two_to_the_31_elements(shape, device):
    samples, channels = shape[:2]
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    weight = torch.randn(channels, device=device)
    y = fusednorm.layer_norm_forward(x, weight, weight, layout="nchw").y
    dx = fusednorm.layer_norm_backward(y, x, weight, weight, layout="nchw").dx
    # The last sample, or the last positions of the only one.
    last = (slice(-1, None),) if samples > 1 else (..., slice(-8, None))
    few = x[last].contiguous()
    right = fusednorm.layer_norm_forward(few, weight, weight, layout="nchw").y
    torch.testing.assert_close(y[last], right, rtol=2**-7, atol=1e-5)
    gradient = fusednorm.layer_norm_backward(y[last].contiguous(), few, weight, weight, layout="nchw").dx
    torch.testing.assert_close(dx[last], gradient, rtol=2**-6, atol=1e-5 * float(gradient.abs().max()))
