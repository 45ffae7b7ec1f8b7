"""Copies of x's companions that have the other memory layout into x's layout, so that kernels read one layout."""

from dataclasses import replace
from typing import Any, TypeVar

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array, workspace_like
from fusednorm.arguments.layouts import has_layout
from fusednorm.integers import cdiv
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width

COPY_BLOCK, COPY_WARPS = 64, 4
"""Rows and columns of a block that a program copies, and its warps."""


_COMPANIONS = ("dy", "residual", "dresidual_out")

AnyCall = TypeVar("AnyCall", GroupNormForwardCall, GroupNormBackwardCall)


def plan_layout_copies(call: AnyCall) -> tuple[AnyCall, list[Launch]]:
    """Plan copies of those tensors of a call that are not in x's memory layout, NCHW or NHWC.

    Returns the call with the copies in place of these tensors, and the launches that make the copies.
    """
    copies: dict[str, Any] = {}
    launches = []
    for name in _COMPANIONS:
        array: Array | None = getattr(call, name, None)
        if array is not None and not has_layout(array, call.sample.channels_last):
            copies[name] = workspace_like(call.x, array.dtype)
            launches.append(_plan_copy(array, copies[name], call.sample))
    return (replace(call, **copies) if copies else call), launches


def _plan_copy(source: Array, copy: Array, sample: SampleShape) -> Launch:
    """Plan the launch that copies `source` to `copy`, from the other memory layout into that of `sample`."""
    rows, columns = (sample.c, sample.hw) if sample.channels_last else (sample.hw, sample.c)
    row_vec, column_vec = (compute_access_width(source.element_size(), size) for size in (rows, columns))
    row_blocks, column_blocks = cdiv(rows, COPY_BLOCK), cdiv(columns, COPY_BLOCK)
    arguments = source, copy, rows // row_vec, columns // column_vec, row_blocks, column_blocks
    options = {"ROW_VEC": row_vec, "COLUMN_VEC": column_vec, "BLOCK": COPY_BLOCK, "num_warps": COPY_WARPS}
    grid = (source.shape[0] * row_blocks * column_blocks,)
    return Launch(group_norm_layout_copy_kernel, grid, arguments, options)


@triton.jit(do_not_specialize=["row_units", "column_units", "row_blocks", "column_blocks"])
def group_norm_layout_copy_kernel(
    source_ptr,
    copy_ptr,
    row_units: tl.int64,
    column_units: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    ROW_VEC: tl.constexpr,
    COLUMN_VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy [N, rows, columns] to [N, columns, rows].  Each program copies one block of one sample.

    The compiler exchanges the block through shared memory, so that both accesses are of adjacent elements.
    """
    rows = row_units * ROW_VEC
    columns = column_units * COLUMN_VEC
    program = tl.program_id(0)
    block = program // column_blocks
    base = (block // row_blocks) * (rows * columns)
    row = (block % row_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = (program % column_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    values = tl.load(source_ptr + base + row * columns + column, mask=mask, eviction_policy="evict_first")
    tl.store(copy_ptr + base + column * rows + row, values, mask=mask)
