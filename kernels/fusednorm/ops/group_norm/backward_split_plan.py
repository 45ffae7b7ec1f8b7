"""Launches of the backward passes of GroupNorm whose programs wait for nothing and read x and dy twice."""

from collections.abc import Mapping
from typing import Any

from fusednorm.integers import cdiv
from fusednorm.launch.launch import Launch, dependent, dropout_arguments
from fusednorm.ops.group_norm import backward_configs as configs
from fusednorm.ops.group_norm.backward_call import BackwardCall
from fusednorm.ops.group_norm.backward_reduce_plan import fold_groups, fold_parameters
from fusednorm.ops.group_norm.channels_last.backward.columns import (
    group_norm_nhwc_backward_apply_kernel,
    group_norm_nhwc_backward_sums_kernel,
)
from fusednorm.ops.group_norm.contiguous.backward.split import (
    group_norm_nchw_backward_apply_kernel,
    group_norm_nchw_backward_sums_kernel,
)
from fusednorm.ops.group_norm.forward_call import empty_statistics
from fusednorm.ops.group_norm.sample import vector_width


def split_launches(call: BackwardCall, config: configs.BackwardSplit) -> list[Launch]:
    sample, itemsize = call.sample, call.x.element_size()
    vec = call.channel_vec
    parts = cdiv(sample.hw, config.part_positions(itemsize))
    blocks = cdiv(sample.channels, config.channels)
    walk = (
        parts, blocks, config.pieces, sample.hw // vec, sample.groups, sample.channels, call.scale_stride,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CHANNELS": config.channels,
        "LANES": 32 * config.num_warps,
        "GROUP": 16 // itemsize,
        "CHUNKS": config.chunks,
        "EVEN": sample.hw % config.part_positions(itemsize) == 0 and sample.channels % config.channels == 0,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **call.gradient_options,
    }
    kernels = group_norm_nchw_backward_sums_kernel, group_norm_nchw_backward_apply_kernel
    return _sums_and_apply(call, kernels, (call.n * sample.groups * blocks * parts,), walk, options, parts)


def columns_launches(call: BackwardCall, config: configs.BackwardColumns) -> list[Launch]:
    sample = call.sample
    vec = vector_width(call.x.element_size(), sample.c)
    slab_rows = config.pieces * config.chunks * config.rows(vec)
    splits = cdiv(sample.hw, slab_rows)
    blocks = cdiv(sample.c, config.columns)
    walk = (
        splits, blocks, config.pieces, sample.hw, sample.c // vec, sample.groups, sample.channels,
        call.scale_stride, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "GROUP": vec,
        "LANES": 32 * config.num_warps,
        "CV": config.columns // vec,
        "CHUNKS": config.chunks,
        "EVEN": sample.c % config.columns == 0 and sample.hw % slab_rows == 0,
        "LABELS": configs.most_touched(sample.channels, vec),
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **call.gradient_options,
    }
    kernels = group_norm_nhwc_backward_sums_kernel, group_norm_nhwc_backward_apply_kernel
    return _sums_and_apply(call, kernels, (call.n * splits * blocks,), walk, options, splits)


def _sums_and_apply(
    call: BackwardCall,
    kernels: tuple[Any, Any],
    grid: tuple[int, ...],
    walk: tuple[Any, ...],
    options: Mapping[str, object],
    splits: int,
) -> list[Launch]:
    """Sums of channels, their fold to groups, dx, and the fold to gradients of parameters."""
    call, launches = call.with_statistics()
    sample = call.sample
    parts = call.parts(splits)
    sum_g, sum_g_xhat = empty_statistics(call.x, sample)
    sums_kernel, apply_kernel = kernels
    sums_arguments = (
        *call.inputs, call.affine_parameters, call.mean, call.rstd, *parts, *walk
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, sum_g, sum_g_xhat,
        call.out.dx, *walk,
    )  # fmt: skip
    sums_options = {
        **options,
        "DY_OTHER": call.lies_otherwise(call.dy),
        "RESIDUAL_OTHER": call.lies_otherwise(call.residual),
    }
    apply_options = {
        **sums_options,
        **dependent(call.early),
        "OUTSIDE_OTHER": call.lies_otherwise(call.dresidual_out),
    }
    return [
        *launches,
        Launch(sums_kernel, grid, sums_arguments, sums_options),
        fold_groups(call, parts, sum_g, sum_g_xhat, splits),
        Launch(apply_kernel, grid, apply_arguments, apply_options),
        *fold_parameters(call, parts, splits),
    ]
