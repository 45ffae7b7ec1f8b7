"""The launches of a GroupNorm forward pass: a function for each algorithm, from checked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fusednorm import group_norm_launch as launch
from fusednorm._group_norm_fold_kernels import group_norm_fold_moments_kernel
from fusednorm._group_norm_nchw_kernels import (
    group_norm_nchw_apply_kernel,
    group_norm_nchw_stats_kernel,
    group_norm_nchw_sweep_kernel,
    group_norm_nchw_tile_kernel,
)
from fusednorm._group_norm_nhwc_kernels import (
    group_norm_nhwc_apply_kernel,
    group_norm_nhwc_slab_kernel,
    group_norm_nhwc_stats_kernel,
)
from fusednorm.checks import Epilogue
from fusednorm.device import INTERPRETED
from fusednorm.epilogue import dropout_threshold
from fusednorm.group_norm_launch import Sample
from fusednorm.launch import Launch
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
    config: launch.Forward | None = None,
) -> list[Launch]:
    """The launches of a forward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = _Call(x, sample, weight, bias, eps, residual, epilogue, out)
    match config or launch.choose_forward(sample, x.element_size()):
        case launch.ForwardTile() as tile:
            return _tile(call, tile)
        case launch.ForwardSweep() as sweep:
            return _sweep(call, sweep)
        case launch.ForwardSplit() as split:
            return _split(call, split)
        case launch.ForwardSlab() as slab:
            return _slab(call, slab)
        case launch.ForwardColumns() as columns:
            return _columns(call, columns)


def plan_statistics(
    x: Tensor, sample: Sample, eps: float, residual: Tensor | None, mean: Tensor, rstd: Tensor
) -> list[Launch]:
    """The launches that fill mean and rstd alone, for a backward pass that needs them and came without."""
    config = launch.split_forward(sample, x.element_size())
    if isinstance(config, launch.ForwardColumns):
        return _column_statistics(x, sample, eps, residual, mean, rstd, config)
    vec = launch.vector_width(x.element_size(), sample.group_length)
    parts, partial = _group_parts(x, sample, residual, config)
    return [partial, _fold_moments(parts, mean, rstd, eps, 1, config.split_units * vec, sample.group_length)]


def empty_statistics(x: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Room for two float32 values of each group, [N, groups]."""
    shape = (x.shape[0], sample.groups)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def dropout_arguments(epilogue: Epilogue) -> tuple[int, int, float]:
    """Seed, threshold and scale as kernels take them."""
    return epilogue.seed or 0, dropout_threshold(epilogue.dropout), 1.0 / (1.0 - epilogue.dropout)


def epilogue_options(epilogue: Epilogue) -> dict[str, object]:
    """The constexprs that say what follows the affine step."""
    return {
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }


def register_cap(limit: int | None, epilogue: Epilogue, residual: Tensor | None) -> dict[str, int]:
    """The compile option that caps registers, where what is fused is known to fit under it unspilled."""
    lean = epilogue.activation != "gelu" and not epilogue.dropout and residual is None
    return {"maxnreg": limit} if limit and lean and not INTERPRETED else {}


def fold_tile(splits: int, columns: int) -> dict[str, int]:
    """The tile in which one group's partial results are folded, as wide as its columns where they fit."""
    block_columns = min(64, triton.next_power_of_2(columns))
    block_splits = min(launch.FOLD_BLOCK // block_columns, triton.next_power_of_2(splits))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": launch.FOLD_NUM_WARPS,
    }


@dataclass(frozen=True, slots=True)
class _Call:
    """The checked arguments of one forward pass."""

    x: Tensor
    sample: Sample
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    residual: Tensor | None
    epilogue: Epilogue
    out: Forward

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.residual, self.weight, self.bias, self.out.y, self.out.residual_out

    @property
    def statistics(self) -> tuple[Tensor | None, ...]:
        return self.out.mean, self.out.rstd

    @property
    def group_vec(self) -> int:
        """Elements of one access where groups are contiguous."""
        return launch.vector_width(self.x.element_size(), self.sample.group_length)

    @property
    def group_units(self) -> int:
        return self.sample.group_length // self.group_vec

    @property
    def channel_walk(self) -> tuple[int, ...]:
        """Groups, channels, and what finds the channel of an element or vector."""
        aligned = self.sample.hw % self.group_vec == 0
        length = self.sample.hw // self.group_vec if aligned else self.sample.hw
        return self.sample.groups, self.sample.channels, *_division(length)

    def contiguous_options(self, units: int, num_warps: int) -> dict[str, object]:
        """Constexprs of the kernels that walk contiguous groups."""
        return {
            "VEC": self.group_vec,
            "UNITS": units,
            "ALIGNED": self.sample.hw % self.group_vec == 0,
            "num_warps": num_warps,
            **epilogue_options(self.epilogue),
        }


def _division(divisor: int) -> tuple[int, int, int]:
    """The divisor, and the multiplier and shift that divide any i < 2^31 by it."""
    shift = (divisor - 1).bit_length()
    return divisor, -(-(1 << (31 + shift)) // divisor), shift


def _tile(call: _Call, config: launch.ForwardTile) -> list[Launch]:
    rows = call.n * call.sample.groups
    arguments = (
        *call.tensors, *call.statistics, rows, call.group_units, *call.channel_walk,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {"ROWS": config.rows, **call.contiguous_options(config.units, config.num_warps)}
    return [Launch(group_norm_nchw_tile_kernel, (triton.cdiv(rows, config.rows),), arguments, options)]


def _sweep(call: _Call, config: launch.ForwardSweep) -> list[Launch]:
    arguments = (
        *call.tensors, *call.statistics, call.group_units, *call.channel_walk,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = call.contiguous_options(config.units, config.num_warps)
    return [Launch(group_norm_nchw_sweep_kernel, (call.n * call.sample.groups,), arguments, options)]


def _split(call: _Call, config: launch.ForwardSplit) -> list[Launch]:
    parts, partial = _group_parts(call.x, call.sample, call.residual, config)
    splits = parts.shape[2]
    programs = triton.cdiv(call.group_units, config.program_units)
    arguments = (
        *call.tensors, parts[0], parts[1], *call.statistics, call.group_units, *call.channel_walk,
        splits, config.split_units, programs, config.program_units,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "BLOCK_SPLITS": min(launch.FOLD_BLOCK, triton.next_power_of_2(splits)),
        "WIDE": call.sample.group_length >= launch.WIDE_GROUP,
        **call.contiguous_options(config.units, config.num_warps),
    }
    grid = (call.n * call.sample.groups * programs,)
    return [partial, Launch(group_norm_nchw_apply_kernel, grid, arguments, options)]


def _group_parts(
    x: Tensor, sample: Sample, residual: Tensor | None, config: launch.ForwardSplit
) -> tuple[Tensor, Launch]:
    """Moments of parts of contiguous groups, [2, N, splits, groups], and what computes them."""
    vec = launch.vector_width(x.element_size(), sample.group_length)
    group_units = sample.group_length // vec
    splits = triton.cdiv(group_units, config.split_units)
    parts = x.new_empty((2, x.shape[0], splits, sample.groups), dtype=torch.float32)
    arguments = (x, residual, parts[0], parts[1], group_units, sample.groups, splits, config.split_units)
    options = {
        "VEC": vec,
        "UNITS": config.units,
        "WIDE": sample.group_length >= launch.WIDE_GROUP,
        "FAST": not INTERPRETED,
        "num_warps": config.num_warps,
    }
    grid = (x.shape[0] * sample.groups * splits,)
    return parts, Launch(group_norm_nchw_stats_kernel, grid, arguments, options)


def _slab(call: _Call, config: launch.ForwardSlab) -> list[Launch]:
    sample = call.sample
    columns = config.slab_groups * sample.channels
    vec = launch.vector_width(call.x.element_size(), sample.c, columns)
    slabs = triton.cdiv(sample.groups, config.slab_groups)
    arguments = (
        *call.tensors, *call.statistics, sample.hw, sample.c // vec, sample.groups, sample.channels,
        config.slab_groups, slabs, call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CV": config.width // vec,
        "ROWS": config.rows,
        "UNROLL": config.unroll,
        "EVEN": columns % config.width == 0 and sample.c % columns == 0,
        "num_warps": config.num_warps,
        **register_cap(config.max_registers, call.epilogue, call.residual),
        **epilogue_options(call.epilogue),
    }
    return [Launch(group_norm_nhwc_slab_kernel, (call.n * slabs,), arguments, options)]


def _columns(call: _Call, config: launch.ForwardColumns) -> list[Launch]:
    sample, out = call.sample, call.out
    if out.mean is None or out.rstd is None:
        mean, rstd = empty_statistics(call.x, sample)
    else:
        mean, rstd = out.mean, out.rstd
    blocks = triton.cdiv(sample.c, config.width)
    runs = triton.cdiv(sample.hw, config.run_rows)
    tile = _column_tile(sample, call.x.element_size(), config)
    arguments = (
        *call.tensors, mean, rstd, sample.hw, sample.c // tile["VEC"], sample.groups, sample.channels,
        runs, config.run_rows, blocks, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {"ROWS": config.apply_rows, **tile, **epilogue_options(call.epilogue)}
    return [
        *_column_statistics(call.x, sample, call.eps, call.residual, mean, rstd, config),
        Launch(group_norm_nhwc_apply_kernel, (call.n * runs * blocks,), arguments, options),
    ]


def _column_tile(sample: Sample, itemsize: int, config: launch.ForwardColumns) -> Mapping[str, int]:
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
    config: launch.ForwardColumns,
) -> list[Launch]:
    """Channel moments over splits of the positions, folded to mean and rstd of groups."""
    splits = triton.cdiv(sample.hw, config.split_rows)
    blocks = triton.cdiv(sample.c, config.width)
    tile = _column_tile(sample, x.element_size(), config)
    parts = x.new_empty((2, x.shape[0], splits, sample.c), dtype=torch.float32)
    arguments = (
        x, residual, parts[0], parts[1], sample.hw, sample.c // tile["VEC"], splits, config.split_rows, blocks
    )  # fmt: skip
    options = {"ROWS": config.rows, "UNROLL": config.unroll, "FAST": not INTERPRETED, **tile}
    grid = (x.shape[0] * splits * blocks,)
    return [
        Launch(group_norm_nhwc_stats_kernel, grid, arguments, options),
        _fold_moments(parts, mean, rstd, eps, sample.channels, config.split_rows, sample.hw),
    ]


def _fold_moments(
    parts: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    group_columns: int,
    split_length: int,
    column_length: int,
) -> Launch:
    splits = parts.shape[2]
    arguments = (
        parts[0], parts[1], mean, rstd, mean.shape[1], group_columns, splits, split_length, column_length, eps
    )  # fmt: skip
    options = {**fold_tile(splits, group_columns), "FAST": not INTERPRETED}
    return Launch(group_norm_fold_moments_kernel, (mean.numel(),), arguments, options)
