"""Launches of the forward pass of GroupNorm that reads channels-last samples twice, all columns side by side."""

import torch

from fusednorm.device import INTERPRETED
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, dependent, dropout_arguments
from fusednorm.ops.group_norm.channels_last.forward.stream import (
    group_norm_nhwc_stream_apply_kernel,
    group_norm_nhwc_stream_fold_kernel,
    group_norm_nhwc_stream_moments_kernel,
)
from fusednorm.ops.group_norm.channels_last.stream_shape import stream_walk
from fusednorm.ops.group_norm.forward_call import ForwardCall, epilogue_options, pair
from fusednorm.ops.group_norm.forward_configs import ForwardStream

_FOLD_CHANNELS = 512
"""Channels at a time, at most, for which a fold writes coefficients."""

_FOLD_WARPS = 4
"""Of a program that folds a group's moments; one warp, which has nobody to wait for, is quicker where few do."""


def stream_launches(call: ForwardCall, config: ForwardStream) -> list[Launch]:
    """Moments of interleaved parts of each sample, their fold to coefficients of each channel, and y."""
    sample, x, out = call.sample, call.x, call.out
    walk = stream_walk(sample, x.element_size(), config, call.n, x.device)
    parts = pair(x, call.n, walk.splits, sample.groups)
    coefficients = x.new_empty((3, call.n, sample.c), dtype=torch.float32)
    piece = walk.positions * walk.apply_chunks
    moments = (
        x, call.residual, *parts, sample.hw, walk.units, sample.groups, sample.channels, walk.splits
    )  # fmt: skip
    fold = (
        *parts, *call.tensors[2:6], out.mean, out.rstd, coefficients, sample.hw, sample.groups,
        sample.channels, walk.splits, walk.step, call.scale_stride, call.n * sample.c, call.eps,
    )  # fmt: skip
    apply = (
        x, call.residual, out.y, out.residual_out, coefficients, sample.hw, walk.units, call.n,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    return [
        Launch(
            group_norm_nhwc_stream_moments_kernel,
            (call.n * walk.splits,),
            moments,
            {
                **walk.tile(config.num_warps),
                **walk.moments(sample),
                "CHUNKS": config.chunks,
                "WHOLE": sample.hw % walk.step == 0,
                "FAST": not INTERPRETED,
                "EARLY": call.early,
            },
        ),
        Launch(
            group_norm_nhwc_stream_fold_kernel,
            (call.n * sample.groups,),
            fold,
            {
                "SPLITS": next_power_of_2(walk.splits),
                "BLOCK_CHANNELS": min(_FOLD_CHANNELS, next_power_of_2(sample.channels)),
                "FAST": not INTERPRETED,
                "num_warps": 1 if walk.is_cut_finer else _FOLD_WARPS,
                **dependent(call.early),
            },
        ),
        Launch(
            group_norm_nhwc_stream_apply_kernel,
            (call.n * cdiv(sample.hw, piece),),
            apply,
            {
                **walk.tile(config.num_warps),
                "IDLE": walk.idle,
                "CHUNKS": walk.apply_chunks,
                "WHOLE": sample.hw % piece == 0,
                **dependent(call.early),
                **epilogue_options(call.epilogue),
            },
        ),
    ]
