"""Norms over the channels of contiguous and channels-last samples, both passes, against the float64 oracle."""

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, UnsupportedShapeError, reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.devices.device_properties import H200
from fusednorm.launch.recorded_launches import recording_launches
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

from tests.kernels.harness.cells import sampled
from tests.kernels.harness.misaligned import misaligned

OPS = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    (2, 48, 4, 8),  # full tiles, wide accesses
    (2, 20, 17),  # accesses of one element, a last tile of one position
    (1, 70, 2, 6),  # accesses of four elements, a last chunk of few channels
    (2, 5, 3),  # fewer positions than a tile
    (2, 3, 2, 2, 2, 2),
)


def make_samples(shape, device, channels_last=False, dtype=torch.float32):
    x = torch.randn(shape, device=device).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


def check(op, x, *, affine=True, residual=None, dresidual_out=None, **options):
    """Both passes, backward with saved statistics and without."""
    channels = x.shape[1]
    count = (1 if op == "rms_norm" else 2) if affine else 0
    parameters = [torch.randn(channels, device=x.device).to(x.dtype) for _ in range(count)]
    options |= {"residual": residual, "layout": "nchw"}
    dy = torch.randn_like(x)
    actual, exact = (
        getattr(library, f"{op}_forward")(x, *parameters, stats=True, **options, **precision)
        for library, precision in ((fusednorm, {}), (reference, {"precision": torch.float64}))
    )
    assert_same(actual, exact)
    saved = {"rstd": actual.rstd} if op == "rms_norm" else {"mean": actual.mean, "rstd": actual.rstd}
    options["dresidual_out"] = dresidual_out
    run = getattr(fusednorm, f"{op}_backward")
    exact = getattr(reference, f"{op}_backward")(dy, x, *parameters, **options, precision=torch.float64)
    assert_same(run(dy, x, *parameters, **options), exact)
    assert_same(run(dy, x, *parameters, **options, **saved), exact)


def assert_same(actual, exact):
    """The results are rounded to their dtype once, which the interpreter does by truncation."""
    for name, right in exact._asdict().items():
        got = getattr(actual, name)
        assert (got is None) == (right is None), name
        if right is not None:
            assert got.shape == right.shape, name
            assert got.stride() == right.stride(), name
            rtol = max(1e-5, torch.finfo(got.dtype).eps)
            atol = 2e-5 * float(right.abs().max() + 1)
            torch.testing.assert_close(got.double(), right.double(), rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("dtype", sampled(DTYPES, DTYPES[:1]))
# Samples with the channels last are rows to the kernels, whatever their shape.
@pytest.mark.parametrize(
    ("shape", "channels_last"), [*((shape, False) for shape in SHAPES), (SHAPES[1], True), (SHAPES[-1], True)]
)
@pytest.mark.parametrize("op", OPS)
def test_every_position_is_a_row(op, shape, channels_last, dtype, device, poisoned):
    check(op, make_samples(shape, device, channels_last, dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("channels_last", [False, True])
def test_results_of_16_bits(channels_last, dtype, device, poisoned):
    x, residual = (make_samples((2, 24, 2, 6), device, channels_last, dtype) for _ in range(2))
    scale, shift, gate = torch.randn(3, 2, 24, device=device).to(dtype)
    check("layer_norm", x)
    check("rms_norm", x, residual=residual, scale=scale, shift=shift, gate=gate, dresidual_out=torch.randn_like(x))


@pytest.mark.parametrize(("channels_last", "affine"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("op", OPS)
def test_each_sample_has_its_scale_and_shift(op, channels_last, affine, device, poisoned):
    wide = torch.randn(2, 60, device=device)
    options = {"scale": wide[:, :20], "shift": wide[:, 40:], "activation": "silu"}
    check(op, make_samples((2, 20, 17), device, channels_last), affine=affine, **options)


@pytest.mark.parametrize(
    ("channels_last", "modulations"),
    [(False, ("gate",)), (False, ("scale", "shift", "gate")), (True, ("scale", "shift", "gate"))],
)
@pytest.mark.parametrize("op", OPS)
def test_each_sample_has_its_gate(op, channels_last, modulations, device, poisoned):
    x, residual, dresidual_out = (make_samples((2, 20, 17), device, channels_last) for _ in range(3))
    parts = torch.randn(2, 60, device=device).chunk(3, 1)
    options = dict(zip(modulations, parts, strict=False)) | {"activation": "silu"}
    check(op, x, residual=residual, dresidual_out=dresidual_out, **options)


@pytest.mark.parametrize("channels_last", [False, True])
def test_all_options(channels_last, device, poisoned):
    shape = (2, 40, 5, 4)
    x, residual, dresidual_out = (make_samples(shape, device, channels_last) for _ in range(3))
    options = {"activation": "gelu", "dropout": 0.25, "seed": 7, "weight_offset": 1.0}
    check("layer_norm", x, residual=residual, dresidual_out=dresidual_out, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, device):
    check("layer_norm", make_samples((2, 12, 3, 4), device), activation=activation)


def test_a_residual_of_another_dtype(device, poisoned):
    x = make_samples((2, 24, 4, 4), device, dtype=torch.bfloat16)
    residual = make_samples(x.shape, device)
    check("layer_norm", x, residual=residual, dresidual_out=torch.randn_like(residual))


# Of 16 positions a thread reads as many elements at once as 16 bytes have, and one where none is aligned.
@pytest.mark.parametrize("dtype", sampled(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("channels_last", [False, True])
def test_misaligned_samples(channels_last, dtype, device, poisoned):
    shape = (2, 24, 4, 4)
    laid_out = (2, 4, 4, 24) if channels_last else shape
    x, residual = (misaligned(laid_out, dtype, device) for _ in range(2))
    if channels_last:
        x, residual = (each.movedim(-1, 1) for each in (x, residual))
    check("layer_norm", x, residual=residual, dresidual_out=torch.randn_like(x))


def test_dropout_masks_do_not_depend_on_the_layout(device):
    x = make_samples((2, 40, 5, 4), device)
    options = {"dropout": 0.5, "seed": 7, "layout": "nchw"}
    y = fusednorm.layer_norm_forward(x, **options).y
    assert torch.equal(y == 0, fusednorm.layer_norm_forward(make_last(x), **options).y == 0)


def make_last(x):
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def few_channels_fit(monkeypatch):
    """Tables by which no more than 16 channels fit a program."""
    for itemsize, access in tables.FORWARD:
        monkeypatch.setitem(tables.FORWARD, (itemsize, access), ((16, ChannelsFirstForwardTile(8, 2, 1)),))
        monkeypatch.setitem(tables.BACKWARD, (itemsize, access), ((16, ChannelsFirstBackwardTile(8, 2, 1)),))
    monkeypatch.setattr(tables, "FORWARD_SWEEP", ChannelsFirstForwardSweep(8, 2))
    monkeypatch.setattr(tables, "BACKWARD_SPLIT", ChannelsFirstBackwardSplit(8, 2, 1))
    fusednorm.launch.replay_cache.clear_replays()


@pytest.mark.usefixtures("few_channels_fit")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(2, 19, 3, 5), (1, 64, 4, 4)])
def test_channels_that_do_not_fit_a_program_are_read_twice(op, shape, device):
    check(op, make_samples(shape, device))


@pytest.mark.usefixtures("few_channels_fit")
def test_all_options_of_channels_that_do_not_fit(device):
    x, residual, dresidual_out = (make_samples((2, 38, 3, 4), device) for _ in range(3))
    options = {"activation": "silu", "dropout": 0.25, "seed": 7, "weight_offset": 1.0}
    options |= {name: torch.randn(2, 38, device=device) for name in ("scale", "shift", "gate")}
    check("layer_norm", x, residual=residual, dresidual_out=dresidual_out, **options)


@pytest.mark.usefixtures("few_channels_fit")
@pytest.mark.parametrize("op", OPS)
def test_channels_of_more_blocks_than_one_sum_adds_up(op, device):
    # Blocks have 16 channels, and a sum adds up 64 of them.
    check(op, make_samples((1, 64 * 16 + 37, 3), device) + 1)


@pytest.mark.parametrize("fits", [True, False])
def test_leaky_relu_has_the_slope_of_the_call(fits, request, device):
    if not fits:
        request.getfixturevalue("few_channels_fit")
    check("layer_norm", make_samples((2, 38, 3, 4), device), activation="leaky_relu", negative_slope=0.3)


@pytest.mark.parametrize("channels", [35, 64])
@pytest.mark.parametrize("fits", [True, False])
def test_a_mean_far_from_zero(channels, fits, request, device):
    if not fits:
        request.getfixturevalue("few_channels_fit")
    x = torch.randn(1, channels, 4, 4, device=device) + 1e6
    actual = fusednorm.layer_norm_forward(x, layout="nchw", stats=True)
    exact = reference.layer_norm_forward(x, layout="nchw", precision=torch.float64)
    plain = torch.nn.functional.layer_norm(x.movedim(1, -1), (channels,)).movedim(-1, 1)
    error, most = ((y.double() - exact.y).abs().max() for y in (actual.y, plain))
    assert error <= 2 * most + 1e-6


def test_a_nan_stays_at_its_position(device):
    x = make_samples((2, 20, 3, 3), device)
    x[1, 4, 1, 2] = float("nan")
    result = fusednorm.layer_norm_forward(x, layout="nchw").y
    is_nan = torch.zeros_like(x, dtype=torch.bool)
    is_nan[1, :, 1, 2] = True
    assert torch.equal(result.isnan(), is_nan)
    dx = fusednorm.layer_norm_backward(torch.ones_like(x), x, layout="nchw").dx
    assert torch.equal(dx.isnan(), is_nan)


def test_a_row_does_not_depend_on_the_other_samples(device):
    x = make_samples((3, 20, 5, 5), device)
    y = fusednorm.layer_norm_forward(x, layout="nchw").y
    assert torch.equal(y[1:2], fusednorm.layer_norm_forward(x[1:2], layout="nchw").y)


def test_zero_eps_of_missing_positions(device):
    x, dy = make_samples((1, 20, 3, 3), device), torch.randn(1, 20, 3, 3, device=device)
    weight, bias = torch.randn(2, 20, device=device)
    gradients = fusednorm.layer_norm_backward(dy, x, weight, bias, eps=0.0, layout="nchw")
    assert not any(gradient.isnan().any() for gradient in gradients[:3])


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3)])
def test_no_positions(shape, device):
    x = torch.randn(shape, device=device)
    assert fusednorm.layer_norm_forward(x, layout="nchw").y.shape == shape
    assert not fusednorm.layer_norm_backward(x, x, torch.ones(4, device=device), layout="nchw").dweight.any()


def test_rows_of_a_wider_channels_last_tensor_are_not_copied(device):
    x = make_last(torch.randn(2, 24, 3, 3, device=device))[:, :16]
    result = fusednorm.layer_norm_forward(x, layout="nchw")
    assert result.y.is_contiguous(memory_format=torch.channels_last)
    exact = reference.layer_norm_forward(x, layout="nchw", precision=torch.float64)
    torch.testing.assert_close(result.y.double(), exact.y.double(), rtol=1e-5, atol=1e-5)


def test_other_strides_and_mixed_layouts_are_refused(device):
    x = torch.randn(2, 8, 4, 4, device=device)
    strided = x.transpose(2, 3)
    for call in (
        lambda: fusednorm.layer_norm_forward(strided, layout="nchw"),
        lambda: fusednorm.rms_norm_backward(strided, strided, layout="nchw"),
    ):
        with pytest.raises(UnsupportedShapeError, match=r"^x must be contiguous or channels-last, got"):
            call()
    with pytest.raises(UnsupportedShapeError, match="residual"):
        fusednorm.layer_norm_forward(x, residual=make_last(x), layout="nchw")


def test_float8_needs_adjacent_channels(device):
    x = torch.randn(2, 8, 4, 4, device=device)
    with pytest.raises(UnsupportedShapeError, match="channels_last"):
        fusednorm.layer_norm_forward(x, layout="nchw", out_dtype=torch.float8_e4m3fn)
    result = fusednorm.layer_norm_forward(make_last(x), layout="nchw", out_dtype=torch.float8_e4m3fn)
    y = result.y.float() * result.y_scale[:, None]
    torch.testing.assert_close(y, fusednorm.layer_norm_forward(x, layout="nchw").y, rtol=0.07, atol=0.02)


@pytest.mark.parametrize(
    ("shape", "options", "match"),
    [
        ((8,), {}, "N, C"),
        ((2, 0, 3), {}, "N, C"),
        ((2, 8, 3), {"weight": (3,)}, "needs weight"),
        ((2, 8, 3), {"weight": (3, 8)}, "each head"),
        ((2, 8, 3), {"scale": (2, 1, 8)}, "needs scale"),
        ((2, 8, 3), {"gate": (2, 8)}, "gate needs a residual"),
        ((2, 8, 3), {"gate": (2, 3), "residual": (2, 8, 3)}, "needs gate"),
        ((2, 8, 3), {"layout": "nhwc"}, "layout must be"),
    ],
)
@pytest.mark.parametrize("library", [fusednorm, reference])
def test_wrong_arguments(library, shape, options, match, device):
    given = {n: torch.ones(of, device=device) if isinstance(of, tuple) else of for n, of in options.items()}
    with pytest.raises(KernelInputError, match=match):
        library.layer_norm_forward(torch.randn(shape, device=device), **{"layout": "nchw"} | given)


def test_overlapping_positions_are_no_rows(device):
    x = torch.randn(8, device=device).view(1, 8, 1, 1).expand(2, 8, 3, 4)
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        fusednorm.layer_norm_forward(x, layout="nchw")


def test_more_positions_than_kernels_count_are_refused():
    x = torch.empty(1, 2, 2**31, dtype=torch.bfloat16, device="meta")
    with recording_launches(H200), pytest.raises(UnsupportedShapeError, match="channels and positions"):
        fusednorm.layer_norm_forward(x, layout="nchw")
