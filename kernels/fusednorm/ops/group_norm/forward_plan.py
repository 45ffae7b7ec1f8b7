"""The launches of a GroupNorm forward pass: a function for each algorithm, from checked tensors."""

from collections.abc import Mapping

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import INTERPRETED, multiprocessor_count, since_hopper
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, dependent, dropout_arguments
from fusednorm.ops.group_norm import forward_choice as group_norm_forward_launch
from fusednorm.ops.group_norm import forward_configs as configs
from fusednorm.ops.group_norm import sample as launch
from fusednorm.ops.group_norm.channels_last.forward.columns import (
    group_norm_nhwc_apply_kernel,
    group_norm_nhwc_stats_kernel,
)
from fusednorm.ops.group_norm.channels_last.stream_plan import stream_launches
from fusednorm.ops.group_norm.checks import lies_otherwise
from fusednorm.ops.group_norm.contiguous.forward.tile import (
    group_norm_nchw_apply_kernel,
    group_norm_nchw_stats_kernel,
    group_norm_nchw_sweep_kernel,
    group_norm_nchw_tile_kernel,
)
from fusednorm.ops.group_norm.contiguous.held_plan import (
    block_launch,
    fitted,
    held_launch,
    shared_block_launch,
    shared_launch,
)
from fusednorm.ops.group_norm.forward_call import ForwardCall, empty_statistics, epilogue_options, pair
from fusednorm.ops.group_norm.reduce import group_norm_fold_moments_kernel
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.policy.waiting import may_wait
from fusednorm.results import Forward


def plan_forward(
    x: Tensor,
    sample: Sample,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    config: configs.Forward | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> list[Launch]:
    """The launches of a forward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = ForwardCall(x, sample, weight, bias, eps, residual, scale, shift, epilogue, out)
    size = x.element_size()
    if config is not None:
        choices: tuple[configs.Forward, ...] = (config,)
    elif lies_otherwise(residual, sample.channels_last):
        choices = (group_norm_forward_launch.split_forward(sample, size),)
    else:
        choices = group_norm_forward_launch.candidates(sample, size, multiprocessor_count(x.device), may_wait())
    fitting = (fits for choice in choices if (fits := fitted(call, choice)) is not None)
    config = next(fitting, None) or group_norm_forward_launch.never_waiting(sample, size)
    match config:
        case configs.ForwardHeld() as held:
            return [held_launch(call, held)]
        case configs.ForwardShared() as shared:
            return [shared_launch(call, shared)]
        case configs.ForwardBlock() as block:
            return [block_launch(call, block)]
        case configs.ForwardSharedBlock() as shared_block:
            return [shared_block_launch(call, shared_block)]
        case configs.ForwardStream() as stream:
            return stream_launches(call, stream)
        case configs.ForwardTile() as tile:
            return _tile(call, tile)
        case configs.ForwardSweep() as sweep:
            return _sweep(call, sweep)
        case configs.ForwardSplit() as split:
            return _split(call, split)
        case configs.ForwardColumns() as columns:
            return _columns(call, columns)


def plan_statistics(
    x: Tensor, sample: Sample, eps: float, residual: Tensor | None, mean: Tensor, rstd: Tensor
) -> list[Launch]:
    """The launches that fill mean and rstd alone, for a backward pass that needs them and came without."""
    config = group_norm_forward_launch.split_forward(sample, x.element_size())
    if isinstance(config, configs.ForwardColumns):
        return _column_statistics(x, sample, eps, residual, mean, rstd, config)
    vec = launch.vector_width(x.element_size(), sample.group_length)
    parts, splits, partial = _group_parts(x, sample, residual, config)
    fold = _fold_moments(parts, splits, mean, rstd, eps, 1, config.split_units * vec, sample.group_length)
    return [partial, fold]


def fold_tile(splits: int, columns: int) -> dict[str, int]:
    """The tile in which one group's partial results are folded, as wide as its columns where they fit."""
    block_columns = min(64, next_power_of_2(columns))
    block_splits = min(launch.FOLD_BLOCK // block_columns, next_power_of_2(splits))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": launch.FOLD_NUM_WARPS,
    }


def _tile(call: ForwardCall, config: configs.ForwardTile) -> list[Launch]:
    rows = call.n * call.sample.groups
    arguments = (
        *call.tensors, *call.statistics, rows, call.group_units, *call.channel_walk,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {"ROWS": config.rows, **call.contiguous_options(config.units, config.num_warps)}
    return [Launch(group_norm_nchw_tile_kernel, (cdiv(rows, config.rows),), arguments, options)]


def _sweep(call: ForwardCall, config: configs.ForwardSweep) -> list[Launch]:
    arguments = (
        *call.tensors, *call.statistics, call.group_units, *call.channel_walk,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = call.contiguous_options(config.units, config.num_warps)
    return [Launch(group_norm_nchw_sweep_kernel, (call.n * call.sample.groups,), arguments, options)]


def _split(call: ForwardCall, config: configs.ForwardSplit) -> list[Launch]:
    parts, splits, partial = _group_parts(call.x, call.sample, call.residual, config)
    programs = cdiv(call.group_units, config.program_units)
    arguments = (
        *call.tensors, *parts, *call.statistics, call.group_units, *call.channel_walk,
        splits, config.split_units, programs, config.program_units,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "BLOCK_SPLITS": min(launch.FOLD_BLOCK, next_power_of_2(splits)),
        "WIDE": call.sample.group_length >= launch.WIDE_GROUP,
        "RESIDUAL_OTHER": lies_otherwise(call.residual, False),
        **dependent(call.early),
        **call.contiguous_options(config.units, config.num_warps),
    }
    grid = (call.n * call.sample.groups * programs,)
    return [partial, Launch(group_norm_nchw_apply_kernel, grid, arguments, options)]


def _group_parts(
    x: Tensor, sample: Sample, residual: Tensor | None, config: configs.ForwardSplit
) -> tuple[tuple[Tensor, Tensor], int, Launch]:
    """Moments of parts of contiguous groups, [N, splits, groups] each, their splits, and what computes them."""
    vec = launch.vector_width(x.element_size(), sample.group_length)
    group_units = sample.group_length // vec
    splits = cdiv(group_units, config.split_units)
    parts = pair(x, x.shape[0], splits, sample.groups)
    arguments = (
        x, residual, *parts, group_units, sample.groups, sample.channels, splits, config.split_units
    )  # fmt: skip
    options = {
        "VEC": vec,
        "UNITS": config.units,
        "WIDE": sample.group_length >= launch.WIDE_GROUP,
        "RESIDUAL_OTHER": lies_otherwise(residual, False),
        "EARLY": since_hopper(x.device),
        "FAST": not INTERPRETED,
        "num_warps": config.num_warps,
    }
    grid = (x.shape[0] * sample.groups * splits,)
    return parts, splits, Launch(group_norm_nchw_stats_kernel, grid, arguments, options)


def _columns(call: ForwardCall, config: configs.ForwardColumns) -> list[Launch]:
    sample, out = call.sample, call.out
    if out.mean is None or out.rstd is None:
        mean, rstd = empty_statistics(call.x, sample)
    else:
        mean, rstd = out.mean, out.rstd
    blocks = cdiv(sample.c, config.width)
    runs = cdiv(sample.hw, config.run_rows)
    tile = _column_tile(sample, call.x.element_size(), config)
    arguments = (
        *call.tensors, mean, rstd, sample.hw, sample.c // tile["VEC"], sample.groups, sample.channels,
        runs, config.run_rows, blocks, call.scale_stride, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "ROWS": config.apply_rows,
        "RESIDUAL_OTHER": lies_otherwise(call.residual, True),
        **tile,
        **dependent(call.early),
        **epilogue_options(call.epilogue),
    }
    return [
        *_column_statistics(call.x, sample, call.eps, call.residual, mean, rstd, config),
        Launch(group_norm_nhwc_apply_kernel, (call.n * runs * blocks,), arguments, options),
    ]


def _column_tile(sample: Sample, itemsize: int, config: configs.ForwardColumns) -> Mapping[str, int]:
    vec = launch.vector_width(itemsize, sample.c)
    return {
        "VEC": vec,
        "CV": config.width // vec,
        "EVEN": sample.c % config.width == 0,
        "num_warps": config.num_warps,
    }


def _column_statistics(
    x: Tensor,
    sample: Sample,
    eps: float,
    residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    config: configs.ForwardColumns,
) -> list[Launch]:
    """Channel moments over splits of the positions, folded to mean and rstd of groups."""
    splits = cdiv(sample.hw, config.split_rows)
    blocks = cdiv(sample.c, config.width)
    tile = _column_tile(sample, x.element_size(), config)
    parts = pair(x, x.shape[0], splits, sample.c)
    arguments = (
        x, residual, *parts, sample.hw, sample.c // tile["VEC"], splits, config.split_rows, blocks
    )  # fmt: skip
    options = {
        "ROWS": config.rows,
        "UNROLL": config.unroll,
        "RESIDUAL_OTHER": lies_otherwise(residual, True),
        "EARLY": since_hopper(x.device),
        "FAST": not INTERPRETED,
        **tile,
    }
    grid = (x.shape[0] * splits * blocks,)
    return [
        Launch(group_norm_nhwc_stats_kernel, grid, arguments, options),
        _fold_moments(parts, splits, mean, rstd, eps, sample.channels, config.split_rows, sample.hw),
    ]


def _fold_moments(
    parts: tuple[Tensor, Tensor],
    splits: int,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    group_columns: int,
    split_length: int,
    column_length: int,
) -> Launch:
    arguments = (
        *parts, mean, rstd, mean.shape[1], group_columns, splits, split_length, column_length, eps
    )  # fmt: skip
    options = {
        **fold_tile(splits, group_columns),
        **dependent(since_hopper(mean.device)),
        "FAST": not INTERPRETED,
    }
    return Launch(group_norm_fold_moments_kernel, (mean.numel(),), arguments, options)
