"""Launches of the forward pass of GroupNorm that reads contiguous groups twice, in pieces."""

from torch import Tensor

from fusednorm.device import INTERPRETED
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, dependent, dropout_arguments, known_whole_in_slabs, registers_for
from fusednorm.ops.group_norm import forward_configs as configs
from fusednorm.ops.group_norm.contiguous.forward.split import (
    group_norm_nchw_split_apply_kernel,
    group_norm_nchw_split_moments_kernel,
)
from fusednorm.ops.group_norm.contiguous.held_plan import parameters_mode, piece_walk
from fusednorm.ops.group_norm.forward_call import ForwardCall, empty_statistics, epilogue_options, pair
from fusednorm.ops.group_norm.reduce import group_norm_fold_moments_kernel
from fusednorm.ops.group_norm.sample import FOLD_BLOCK, FOLD_NUM_WARPS, WIDE_GROUP


def pieces_launches(call: ForwardCall, config: configs.ForwardPieces) -> list[Launch]:
    """Moments of pieces, their fold to mean and rstd, and y."""
    out = call.out
    if out.mean is None or out.rstd is None:
        mean, rstd = empty_statistics(call.x, call.sample)
    else:
        mean, rstd = out.mean, out.rstd
    sample, size = call.sample, call.x.element_size()
    block = 32 * config.num_warps * 16 // size
    piece = config.chunks * block
    splits = cdiv(sample.group_length, piece)
    parts = pair(call.x, call.n, splits, sample.groups)
    grid = (call.n * sample.groups * splits,)
    options = {
        "VEC": call.group_vec,
        "BLOCK": block,
        "CHUNKS": config.chunks,
        "FULL": known_whole_in_slabs(sample.group_length, block, config.chunks, call.has_lane_a_thread),
        "GROUP": 16 // size,
        "num_warps": config.num_warps,
        "maxnreg": registers_for(config),
    }
    moments = (call.x, call.residual, *parts, call.group_units, sample.groups, splits)
    apply = (
        *call.tensors, mean, rstd, call.group_units, *piece_walk(call), splits, *dropout_arguments(call.epilogue)
    )  # fmt: skip
    moments_options = {**options, "EARLY": call.early, "FAST": not INTERPRETED}
    apply_options = {
        **options,
        "PARAMETERS": parameters_mode(call, block, piece),
        "WIDE": sample.group_length >= WIDE_GROUP,
        **dependent(call.early),
        **epilogue_options(call.epilogue),
    }
    return [
        Launch(group_norm_nchw_split_moments_kernel, grid, moments, moments_options),
        _fold(call, parts, mean, rstd, splits, piece),
        Launch(group_norm_nchw_split_apply_kernel, grid, apply, apply_options),
    ]


def _fold(
    call: ForwardCall, parts: tuple[Tensor, Tensor], mean: Tensor, rstd: Tensor, splits: int, split_length: int
) -> Launch:
    sample = call.sample
    arguments = (*parts, mean, rstd, sample.groups, 1, splits, split_length, sample.group_length, call.eps)
    options = {
        "BLOCK_SPLITS": min(FOLD_BLOCK, next_power_of_2(splits)),
        "BLOCK_COLUMNS": 1,
        "num_warps": FOLD_NUM_WARPS,
        **dependent(call.early),
        "FAST": not INTERPRETED,
    }
    return Launch(group_norm_fold_moments_kernel, (mean.numel(),), arguments, options)
