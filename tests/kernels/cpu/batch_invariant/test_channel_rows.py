"""LayerNorm and RMSNorm over the channels of samples: the oracle, and bits that do not depend on other samples."""

from itertools import product

import pytest
import torch
from fusednorm import reference
from fusednorm.cpu import batch_invariant
from fusednorm.cpu.batch_invariant.channel_rows import ChannelRows
from fusednorm.cpu.chunks import split_rows

from tests.kernels.cpu.batch_invariant.test_oracle import assert_right
from tests.sampling import mark_rest_slow

OPS = ("layer_norm", "rms_norm")
# Several samples in a piece, some positions of a sample, no spatial axis, a position that is longer than a piece.
SHAPES = [(5, 40, 3, 2), (2, 1000, 150), (300, 7), (2, 140_001, 2)]
OPTIONS = [{}, {"activation": "silu"}, {"activation": "gelu", "dropout": 0.3, "seed": 5}]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def make_call(op, shape, given, dtype=torch.float32):
    """Tensors of both passes by name."""
    tensors = {name: torch.randn(shape).to(dtype) for name in ("x", "dy")}
    tensors["weight"] = torch.randn(shape[1])
    if op == "layer_norm":
        tensors["bias"] = torch.randn(shape[1]).bfloat16()
    if "residual" in given:
        tensors["residual"] = torch.randn(shape).half()
    types = {"scale": torch.float16, "shift": torch.bfloat16, "gate": torch.float32}
    return tensors | {name: torch.randn(shape[:2]).to(types[name]) for name in types if name in given}


@pytest.mark.parametrize(
    ("op", "shape", "given", "options"),
    mark_rest_slow(
        product(
            OPS, SHAPES, [(), ("residual",), ("scale", "shift"), ("residual", "scale", "shift", "gate")], OPTIONS
        )
    ),
)
def test_both_passes(op, shape, given, options):
    tensors = make_call(op, shape, given)
    dy = tensors.pop("dy")
    asked = tensors | options | {"layout": "nchw"}
    forward = getattr(batch_invariant, f"{op}_forward")(**asked, stats=True)
    right = getattr(reference, f"{op}_forward")(**asked, stats=True, precision=torch.float64)
    assert_right(forward, right)
    oracle = getattr(reference, f"{op}_backward")(dy, **asked, precision=torch.float64)
    assert_right(getattr(batch_invariant, f"{op}_backward")(dy, **asked), oracle)
    saved = {name: getattr(forward, name) for name in ("mean", "rstd") if getattr(forward, name) is not None}
    assert_right(getattr(batch_invariant, f"{op}_backward")(dy, **asked, **saved), oracle)


@pytest.mark.parametrize("op", OPS)
def test_types_and_strides_of_x_are_those_of_results(op):
    x = torch.randn(2, 8, 3, 5).bfloat16().contiguous(memory_format=torch.channels_last)
    asked = {"weight": torch.randn(8), "layout": "nchw"}
    for out_dtype in (None, torch.float32, torch.float8_e4m3fn):
        got = getattr(batch_invariant, f"{op}_forward")(x, **asked, out_dtype=out_dtype)
        right = getattr(reference, f"{op}_forward")(x, **asked, out_dtype=out_dtype)
        assert got.y.dtype == right.y.dtype
        assert got.y.stride() == right.y.stride()
        if out_dtype is torch.float8_e4m3fn:
            torch.testing.assert_close(got.y_scale, right.y_scale)
        torch.testing.assert_close(got.y.float(), right.y.float(), rtol=0.08, atol=0.02)
    backward = f"{op}_backward"
    got, right = (getattr(each, backward)(x, x, **asked) for each in (batch_invariant, reference))
    assert_right(got, right)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(5, 40, 3), (6, 129, 700)])
@pytest.mark.parametrize("op", OPS)
def test_bits_of_a_sample_do_not_depend_on_the_others(op, shape, threads):
    tensors = make_call(op, shape, ("residual", "scale", "shift"), torch.bfloat16)
    dy = tensors.pop("dy")
    parameters = {name: tensors.pop(name) for name in ("weight", "bias") if name in tensors}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        forward = getattr(batch_invariant, f"{op}_forward")(**tensors, **parameters, layout="nchw", stats=True)
        backward = getattr(batch_invariant, f"{op}_backward")(dy, **tensors, layout="nchw")
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (1, 4)):
            some = {name: tensor[first:last] for name, tensor in tensors.items()}
            alone = getattr(batch_invariant, f"{op}_forward")(**some, **parameters, layout="nchw", stats=True)
            for name in ("y", "rstd", "residual_out"):
                assert torch.equal(getattr(alone, name), getattr(forward, name)[first:last]), name
            alone = getattr(batch_invariant, f"{op}_backward")(dy[first:last], **some, layout="nchw")
            for name in ("dx", "dresidual", "dscale", "dshift"):
                assert torch.equal(getattr(alone, name), getattr(backward, name)[first:last]), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(5, 40, 3), (2, 1000, 150), (1, 300_000, 2), (4, 6)])
def test_ranges_have_every_row_once(shape):
    x = torch.randn(shape)
    rows, copied = ChannelRows(x), ChannelRows(torch.full(shape, torch.nan))
    expected = x.movedim(1, -1).reshape(-1, shape[1])
    assert len(rows) == len(expected)
    for piece in split_rows(*rows.shape, len(rows) // shape[0]):
        assert torch.equal(rows[piece], expected[piece])
        copied[piece] = rows[piece]
    assert torch.equal(copied[slice(0, len(rows))], expected)


def test_y_may_be_written_over_x():
    x = torch.randn(3, 500, 300)
    right = batch_invariant.layer_norm_forward(x, layout="nchw").y
    got = batch_invariant.layer_norm_forward(x, layout="nchw", memory_like=lambda tensor: tensor).y
    assert got is x
    assert torch.equal(got, right)
