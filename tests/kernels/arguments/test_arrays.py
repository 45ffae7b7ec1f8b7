"""Descriptions of arrays say of strides and parts what torch does with tensors."""

import itertools
from dataclasses import asdict, replace

import pytest
import torch
from fusednorm.arguments.arrays import (
    contiguous_strides,
    has_dense_strides,
    merge_axes,
    new_workspace,
    workspace_like,
)
from fusednorm.arguments.checks import view_as_heads, view_as_rows
from fusednorm.arguments.layouts import has_layout
from fusednorm.errors import UnsupportedShapeError
from fusednorm.tensors import layouts
from fusednorm.tensors.arrays import describe_as_array

BASE = torch.zeros(6, 4, 5, 8)
VIEWS = [
    view
    for sizes in itertools.product((slice(None), slice(0, 1), slice(0, 3)), repeat=4)
    for view in (BASE[sizes], BASE[sizes].transpose(0, 1), BASE[sizes].movedim(-1, 1), BASE[sizes][:0])
]


def view_or_none(tensor, *shape):
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None


def test_strides_are_dense_where_tensors_are_contiguous():
    for view in VIEWS:
        assert has_dense_strides(tuple(view.shape), view.stride()) == view.is_contiguous()
        assert all(
            has_layout(describe_as_array("x", view), last) == layouts.is_in_layout(view, last)
            for last in (False, True)
        )


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (3, 1, 4), (2, 3, 4, 5), (3, 0, 4)])
def test_contiguous_strides_are_those_of_a_new_tensor(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(("as_view", "kept"), [(view_as_rows, 1), (view_as_heads, 2)])
def test_axes_are_merged_where_a_tensor_can_be_viewed_so(as_view, kept):
    merged = 0
    for view in VIEWS:
        if view.stride(-1) != 1 and view.shape[-1] > 1 and view.numel():
            continue
        shape = (view[..., 0].numel() if kept == 1 else view[..., 0, 0].numel(), *view.shape[-kept:])
        wanted = view_or_none(view, *shape)
        if wanted is None:
            assert merge_axes(tuple(view.shape[:-kept]), view.stride()[:-kept]) is None
            with pytest.raises(UnsupportedShapeError, match="one constant stride apart"):
                as_view("x", describe_as_array("x", view))
            continue
        merged += 1
        array = as_view("x", describe_as_array("x", view))
        assert array.shape == wanted.shape
        # The stride of an axis of one element, and of none at all, is never used.
        steps = zip(array.shape, array.strides, wanted.stride(), strict=True)
        assert all(stride == other for size, stride, other in steps if size > 1 and view.numel())
    assert merged > 20


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
def test_parts_of_a_workspace_are_aligned_where_they_start_at_16_bytes(length):
    parts = new_workspace(describe_as_array("x", BASE), 5, length).unbind()
    assert [part.offset for part in parts] == [index * length for index in range(5)]
    assert [part.is_aligned for part in parts] == [index * length % 4 == 0 for index in range(5)]
    assert {(part.shape, part.strides) for part in parts} == {((length,), (1,))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "x", [BASE, BASE.to(memory_format=torch.channels_last)], ids=["contiguous", "channels-last"]
)
def test_a_workspace_like_an_array_is_described_as_a_new_tensor_like_it(x, dtype):
    wanted = describe_as_array("copy", torch.empty_like(x, dtype=dtype))
    copy = workspace_like(describe_as_array("x", x), wanted.dtype)
    assert (copy.memory.dtype, copy.memory.count, copy.memory.purpose) == (wanted.dtype, x.numel(), None)
    assert asdict(replace(copy, memory="copy")) == asdict(wanted)
