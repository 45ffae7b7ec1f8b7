"""Launches of the forward pass of GroupNorm that streams channels-last samples twice."""

from math import gcd

import torch
import triton

from fusednorm._group_norm_nhwc_stream_kernels import (
    group_norm_nhwc_stream_apply_kernel,
    group_norm_nhwc_stream_fold_kernel,
    group_norm_nhwc_stream_moments_kernel,
)
from fusednorm.device import INTERPRETED
from fusednorm.group_norm_forward_call import ForwardCall, epilogue_options
from fusednorm.group_norm_forward_configs import ForwardStream
from fusednorm.group_norm_launch import stream_walk
from fusednorm.launch import Launch, dependent, dropout_arguments

_FOLD_ELEMENTS = 4096
"""Partial results that the fold of one group takes at once, at most."""

_FOLD_CHANNELS = 512
"""Channels at a time, at most, for which the fold writes coefficients."""


def stream_launches(call: ForwardCall, config: ForwardStream) -> list[Launch]:
    """Moments of interleaved parts of each sample, their fold to coefficients of each channel, and y."""
    sample, x, out = call.sample, call.x, call.out
    walk = stream_walk(sample, x.element_size(), config.num_warps, config.chunks, config.splits)
    keep = walk.vec // gcd(walk.vec, sample.channels)
    width = walk.vec // keep
    parts = x.new_empty((2, call.n, walk.parts, sample.c // width), dtype=torch.float32)
    coefficients = x.new_empty((3, call.n, sample.c), dtype=torch.float32)
    tile = {"VEC": walk.vec, "LANES": walk.lanes, "IDLE": walk.idle, "num_warps": config.num_warps}
    piece = walk.positions * config.apply_chunks
    block_runs = triton.next_power_of_2(sample.channels // width)
    block_parts = min(triton.next_power_of_2(walk.parts), max(1, _FOLD_ELEMENTS // block_runs))
    moments = (x, call.residual, parts[0], parts[1], sample.hw, walk.units, walk.splits)
    fold = (
        parts[0], parts[1], *call.tensors[2:6], out.mean, out.rstd, coefficients, sample.hw, sample.groups,
        sample.channels, walk.splits, walk.positions, config.chunks, walk.parts, sample.channels // width,
        call.scale_stride, call.n * sample.c, call.eps,
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
                **tile,
                "POSITIONS": walk.summed_positions,
                "CHUNKS": config.chunks,
                "WHOLE": sample.hw % walk.step == 0,
                "KEEP": keep,
                "FAST": not INTERPRETED,
                "EARLY": call.early,
            },
        ),
        Launch(
            group_norm_nhwc_stream_fold_kernel,
            (call.n * sample.groups,),
            fold,
            {
                "POSITIONS": walk.summed_positions,
                "WIDTH": width,
                "BLOCK_PARTS": block_parts,
                "BLOCK_RUNS": block_runs,
                "BLOCK_CHANNELS": min(_FOLD_CHANNELS, triton.next_power_of_2(sample.channels)),
                "FAST": not INTERPRETED,
                "num_warps": max(1, min(8, block_parts * block_runs // 128)),
                **dependent(call.early),
            },
        ),
        Launch(
            group_norm_nhwc_stream_apply_kernel,
            (call.n * triton.cdiv(sample.hw, piece),),
            apply,
            {
                **tile,
                "CHUNKS": config.apply_chunks,
                "WHOLE": sample.hw % piece == 0,
                **dependent(call.early),
                **epilogue_options(call.epilogue),
            },
        ),
    ]
