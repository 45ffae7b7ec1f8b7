"""The options of a call, as their declarations have them."""

from dataclasses import replace
from inspect import signature

import fusednorm
import pytest
from normserve.jobs.job import OPTIONS, ROW_OPS, ChannelLayout, NormSpec, Op, PassDirection, list_options
from normserve.memory.tensors import DType

SPEC = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, eps=1e-5, num_groups=2, dropout=0.5, seed=1)
OTHER = {
    "eps": 1e-3,
    "num_groups": 4,
    "layout": ChannelLayout.NHWC,
    "weight_offset": 1.0,
    "activation": "silu",
    "negative_slope": 0.25,
    "dropout": 0.25,
    "seed": 2,
    "out_dtype": DType.FLOAT16,
    "stats": True,
}
OF_ANY_VALUE = {"eps", "negative_slope", "dropout", "seed"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_specs_with_another_value_are_others_and_run_other_kernels_where_these_depend_on_it(option):
    other = replace(SPEC, **{option.name: OTHER[option.name]})
    assert other != SPEC
    assert hash(other) != hash(SPEC)
    assert (other.kernel_key == SPEC.kernel_key) == (option.name in OF_ANY_VALUE)


@pytest.mark.parametrize("op", ROW_OPS)
def test_channels_that_are_last_are_no_layout_of_rows(op):
    rows = NormSpec(op, PassDirection.FORWARD, 1e-5)
    last = NormSpec(op, PassDirection.FORWARD, 1e-5, layout=ChannelLayout.NHWC)
    assert (last, hash(last), last.kernel_key) == (rows, hash(rows), rows.kernel_key)
    assert last.layout is None
    assert replace(rows, layout=ChannelLayout.NCHW).layout is ChannelLayout.NCHW
    assert replace(SPEC, layout=None) == replace(SPEC, layout=ChannelLayout.NCHW)


def test_a_seed_without_dropout_draws_nothing():
    assert replace(SPEC, dropout=0.0).seed is None
    assert replace(SPEC, dropout=0.0) == replace(SPEC, dropout=0.0, seed=2)


def test_dropout_runs_other_kernels_than_none():
    assert replace(SPEC, dropout=0.0, seed=None).kernel_key != SPEC.kernel_key


@pytest.mark.parametrize(("op", "direction"), [(op, direction) for op in Op for direction in op.passes])
def test_the_library_takes_every_option_but_the_layout_of_groups(op, direction):
    name = op.value if op is Op.LAYER_NORM_CHAIN else f"{op.value}_{direction.value}"
    taken = signature(getattr(fusednorm, name)).parameters
    known = {"layout"} if op is Op.GROUP_NORM else set()
    assert {option.name for option in list_options(op, direction)} - known <= taken.keys()
