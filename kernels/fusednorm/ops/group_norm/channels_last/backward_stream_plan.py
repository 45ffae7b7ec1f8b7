"""Launches of the backward pass of GroupNorm that streams channels-last samples twice."""

from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, can_prefetch, dependent, dropout_arguments
from fusednorm.ops.group_norm.backward_call import BackwardCall
from fusednorm.ops.group_norm.backward_configs import BackwardStream, most_touched
from fusednorm.ops.group_norm.backward_reduce_plan import fold_groups, fold_parameters
from fusednorm.ops.group_norm.channels_last.backward.stream import (
    group_norm_nhwc_backward_stream_apply_kernel,
    group_norm_nhwc_backward_stream_sums_kernel,
)
from fusednorm.ops.group_norm.channels_last.stream_shape import stream_walk
from fusednorm.ops.group_norm.forward_call import empty_statistics


def stream_launches(call: BackwardCall, config: BackwardStream) -> list[Launch]:
    """Sums of interleaved parts of each sample, their fold to groups, dx, and the parameters' gradients."""
    call, launches = call.with_statistics()
    sample = call.sample
    walk = stream_walk(sample, call.x.element_size(), config, call.n, call.x.device)
    parts = call.parts(walk.splits)
    sum_g, sum_g_xhat = empty_statistics(call.x, sample)
    piece = walk.positions * walk.apply_chunks
    pieces = 1 if walk.is_cut_finer else config.apply_pieces
    programs = cdiv(sample.hw, piece * pieces)
    epilogue = (call.scale_stride, *dropout_arguments(call.epilogue))
    sums = (
        *call.inputs, call.affine_parameters, call.mean, call.rstd, *parts, sample.hw, walk.units,
        sample.groups, sample.channels, walk.splits, *epilogue,
    )  # fmt: skip
    apply = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, sum_g, sum_g_xhat,
        call.out.dx, sample.hw, walk.units, sample.groups, sample.channels, call.n, pieces, *epilogue,
    )  # fmt: skip
    options = {
        **walk.tile(config.num_warps),
        "IDLE": walk.idle,
        "LABELS": most_touched(sample.channels, walk.vec),
        "PREFETCH": can_prefetch(sample.c, *call.inputs),
        **call.gradient_options,
    }
    sums_options = {
        **options,
        "POSITIONS": walk.positions,
        "COLUMNS": walk.vec * next_power_of_2(walk.units),
        "CHUNKS": config.chunks,
        "WHOLE": sample.hw % walk.step == 0,
        "EARLY": call.early,
    }
    apply_options = {
        **options,
        "CHUNKS": walk.apply_chunks,
        "WHOLE": sample.hw % (piece * pieces) == 0,
        **dependent(call.early),
    }
    return [
        *launches,
        Launch(group_norm_nhwc_backward_stream_sums_kernel, (call.n * walk.splits,), sums, sums_options),
        fold_groups(call, parts, sum_g, sum_g_xhat, walk.splits),
        Launch(group_norm_nhwc_backward_stream_apply_kernel, (call.n * programs,), apply, apply_options),
        *fold_parameters(call, parts, walk.splits, beside=True),
    ]
