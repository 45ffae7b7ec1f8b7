"""Scale, shift and gate of each sample of rows: the oracle, and bits that do not depend on the other samples."""

from itertools import product

import pytest
import torch
from fusednorm import reference
from fusednorm.cpu import batch_invariant
from fusednorm.cpu.batch_invariant.row_modulation import sum_tokens_

from tests.kernels.cpu.batch_invariant.test_oracle import assert_right
from tests.sampling import mark_rest_slow

OPS = ("layer_norm", "rms_norm")
# Several samples in a piece, some tokens of a sample, one row that is longer than a piece.
SHAPES = [(5, 3, 40), (300, 1, 7), (2, 300, 1000), (2, 2, 140_001)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def make_call(op, shape, given, dtype=torch.float32):
    """Tensors of both passes by name."""
    samples, _, cols = shape
    tensors = {name: torch.randn(shape).to(dtype) for name in ("x", "dy", "residual")}
    tensors["weight"] = torch.randn(cols)
    if op == "layer_norm":
        tensors["bias"] = torch.randn(cols)
    types = {"scale": torch.float16, "shift": torch.bfloat16, "gate": torch.float32}
    return tensors | {name: torch.randn(samples, cols).to(types[name]) for name in given}


@pytest.mark.parametrize(
    ("op", "shape", "given", "options"),
    mark_rest_slow(
        product(
            OPS,
            SHAPES,
            [("scale",), ("shift",), ("gate",), ("scale", "shift", "gate")],
            [{}, {"activation": "silu"}, {"activation": "gelu", "dropout": 0.3, "seed": 5}],
        )
    ),
)
def test_both_passes(op, shape, given, options):
    tensors = make_call(op, shape, given)
    dy = tensors.pop("dy")
    for library_call, oracle_call, leading in (
        (f"{op}_forward", f"{op}_forward", ()),
        (f"{op}_backward", f"{op}_backward", (dy,)),
    ):
        got = getattr(batch_invariant, library_call)(*leading, **tensors, **options)
        assert_right(got, getattr(reference, oracle_call)(*leading, **tensors, **options, precision=torch.float64))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(5, 3, 40), (9, 700, 129)])
@pytest.mark.parametrize("op", OPS)
def test_bits_of_a_sample_do_not_depend_on_the_others(op, shape, threads):
    tensors = make_call(op, shape, ("scale", "shift", "gate"), torch.bfloat16)
    del tensors["weight"]
    tensors.pop("bias", None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = getattr(batch_invariant, f"{op}_backward")(**tensors)
        for first, last in ((0, 1), (1, 4)):
            some = {name: tensor[first:last] for name, tensor in tensors.items()}
            alone = getattr(batch_invariant, f"{op}_backward")(**some)
            for name in ("dx", "dresidual", "dscale", "dshift", "dgate"):
                assert torch.equal(getattr(alone, name), getattr(together, name)[first:last]), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64, 1001])
def test_every_token_is_summed_once(tokens):
    terms = torch.randint(-1000, 1000, (3, tokens, 5)).float()
    right = terms.sum(1)
    assert torch.equal(sum_tokens_(terms.clone()), right)


def test_nan_stays_in_its_sample():
    tensors = make_call("layer_norm", (3, 4, 8), ("scale", "shift", "gate"))
    tensors["dy"][1, 2, 5] = torch.nan
    result = batch_invariant.layer_norm_backward(**tensors)
    for gradient in (result.dscale, result.dshift):
        broken = gradient.isnan()
        assert broken[1, 5]
        assert broken.sum() == 1
    assert not result.dx[[0, 2]].isnan().any()
