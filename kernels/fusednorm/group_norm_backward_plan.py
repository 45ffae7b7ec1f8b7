"""The launches of a GroupNorm backward pass: a function for each algorithm, from checked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from fusednorm import group_norm_backward_launch as configs
from fusednorm._group_norm_backward_fold_kernels import (
    group_norm_fold_rows_kernel,
    group_norm_fold_samples_kernel,
    group_norm_fold_sums_kernel,
)
from fusednorm._group_norm_gradients import derivative_gain
from fusednorm._group_norm_nchw_backward_kernels import group_norm_nchw_backward_tile_kernel
from fusednorm._group_norm_nchw_backward_shared_kernels import group_norm_nchw_backward_shared_kernel
from fusednorm._group_norm_nchw_backward_split_kernels import (
    group_norm_nchw_backward_apply_kernel,
    group_norm_nchw_backward_sums_kernel,
)
from fusednorm._group_norm_nhwc_backward_shared_kernels import group_norm_nhwc_backward_shared_kernel
from fusednorm._group_norm_nhwc_backward_split_kernels import (
    group_norm_nhwc_backward_apply_kernel,
    group_norm_nhwc_backward_sums_kernel,
)
from fusednorm.checks import Epilogue
from fusednorm.device import multiprocessor_count, since_hopper
from fusednorm.group_norm_checks import in_layout
from fusednorm.group_norm_forward_call import empty_statistics, epilogue_options
from fusednorm.group_norm_forward_plan import plan_statistics
from fusednorm.group_norm_launch import Sample, vector_width
from fusednorm.launch import Launch, can_prefetch, dependent, dropout_arguments, mailbox, resident_options
from fusednorm.results import Backward


def plan_backward(
    dy: Tensor,
    x: Tensor,
    sample: Sample,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    out: Backward,
    config: configs.Backward | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> list[Launch]:
    """The launches of a backward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = _Call(dy, x, sample, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, out, scale, shift)
    if config is None:
        if call.lies_otherwise(dy) or call.lies_otherwise(dresidual_out):
            config = configs.split_backward(sample, x.element_size())
        else:
            config = configs.choose_backward(sample, x.element_size(), multiprocessor_count(x.device))
    match config:
        case configs.BackwardTile() as tile:
            return _tile(call, tile)
        case configs.BackwardShared() as shared:
            return _shared(call, shared)
        case configs.BackwardBlocks() as blocks:
            return _blocks(call, blocks)
        case configs.BackwardSplit() as split:
            return _split(call, split)
        case configs.BackwardColumns() as columns:
            return _columns(call, columns)


@dataclass(frozen=True, slots=True)
class _Call:
    """The checked arguments of one backward pass."""

    dy: Tensor
    x: Tensor
    sample: Sample
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    mean: Tensor | None
    rstd: Tensor | None
    residual: Tensor | None
    dresidual_out: Tensor | None
    epilogue: Epilogue
    out: Backward
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def early(self) -> bool:
        """Whether a kernel may start before the one before it ends."""
        return since_hopper(self.x.device)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.dy, self.x, self.residual

    @property
    def affine(self) -> bool:
        return any(parameter is not None for parameter in self.affine_parameters)

    @property
    def gradient_options(self) -> dict[str, object]:
        """The constexprs that say how dy leads back to dz."""
        gain = derivative_gain(self.epilogue.activation, self.x.element_size())
        return {"GAIN": gain, **epilogue_options(self.epilogue)}

    def lies_otherwise(self, tensor: Tensor | None) -> bool:
        """Whether a companion of x is in the other of the two layouts."""
        return tensor is not None and not in_layout(tensor, self.sample.channels_last)

    @property
    def channel_vec(self) -> int:
        """Elements of one access where channels are contiguous."""
        return vector_width(self.x.element_size(), self.sample.hw)

    @property
    def affine_parameters(self) -> tuple[Tensor | None, ...]:
        """What makes z of x_hat: weight, bias, scale, shift."""
        return self.weight, self.bias, self.scale, self.shift

    def parts(self, splits: int) -> Tensor:
        """Room for the sums of dz and of dz * x_hat, float32 [2, N * splits, C]."""
        return self.x.new_empty((2, self.n * splits, self.sample.c), dtype=torch.float32)

    def wanted_parts(self, splits: int) -> tuple[Tensor | None, Tensor | None]:
        """`parts`, or twice None where nothing will be folded from them."""
        if not self.affine:
            return None, None
        parts = self.parts(splits)
        return parts[0], parts[1]

    def with_statistics(self) -> tuple["_Call", list[Launch]]:
        """The call with mean and rstd, and what fills them first where they did not come."""
        if self.mean is not None:
            return self, []
        mean, rstd = empty_statistics(self.x, self.sample)
        launches = plan_statistics(self.x, self.sample, self.eps, self.residual, mean, rstd)
        return replace(self, mean=mean, rstd=rstd), launches


def _tile(call: _Call, config: configs.BackwardTile) -> list[Launch]:
    vec, sample = call.channel_vec, call.sample
    rows = call.n * sample.groups
    parts = call.wanted_parts(1)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *parts,
        rows, sample.hw // vec, sample.groups, sample.channels, call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "ROWS": config.rows,
        "CHANNELS": config.channels,
        "POSITIONS": config.positions,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **call.gradient_options,
    }
    grid = (triton.cdiv(rows, config.rows),)
    return [
        Launch(group_norm_nchw_backward_tile_kernel, grid, arguments, options),
        *_fold_parameters(call, parts, 1),
    ]


def _shared(call: _Call, config: configs.BackwardShared) -> list[Launch]:
    call, launches = call.with_statistics()
    sample, itemsize = call.sample, call.x.element_size()
    vec = call.channel_vec
    members = config.members(sample, itemsize)
    parts = triton.cdiv(sample.hw, config.part_positions(itemsize))
    resident = multiprocessor_count(call.x.device) * config.programs_per_sm
    rows = call.n * sample.groups
    # A team that is not resident is refused by the device.
    teams = max(1, min(rows, resident // members))
    depth = triton.next_power_of_2(2 * triton.cdiv(config.lag, config.pieces))
    partial = call.wanted_parts(parts)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *partial,
        mailbox(call.x.device, depth * teams * members),
        rows, members, parts, sample.hw // vec, sample.groups, sample.channels, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CHANNELS": config.channels,
        "LANES": 32 * config.num_warps,
        "GROUP": 16 // itemsize,
        "CHUNKS": config.chunks,
        "PIECES": config.pieces,
        "EVEN": sample.hw % config.part_positions(itemsize) == 0 and sample.channels % config.channels == 0,
        "SLOTS": triton.next_power_of_2(members),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead if can_prefetch(vec, call.x, call.dy) else 0,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **resident_options(config),
        **call.gradient_options,
    }
    return [
        *launches,
        Launch(group_norm_nchw_backward_shared_kernel, (teams * members,), arguments, options),
        *_fold_parameters(call, partial, parts),
    ]


def _blocks(call: _Call, config: configs.BackwardBlocks) -> list[Launch]:
    call, launches = call.with_statistics()
    sample, itemsize = call.sample, call.x.element_size()
    group = 16 // itemsize
    splits, members = config.splits(sample, itemsize), config.members(sample, itemsize)
    blocks = config.bundle_blocks(sample)
    bundle_groups = min(blocks * config.columns, sample.c) // sample.channels
    bundles = triton.cdiv(sample.groups, bundle_groups)
    units = call.n * bundles
    resident = multiprocessor_count(call.x.device) * config.programs_per_sm
    teams = max(1, min(units, resident // members))
    depth = triton.next_power_of_2(triton.cdiv(config.lag, config.pieces))
    overlap = min(blocks, configs.most_touched(config.columns, sample.channels))
    partial = call.wanted_parts(splits)
    pairs = teams * depth * bundle_groups * (splits * overlap + 1)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *partial,
        mailbox(call.x.device, triton.cdiv(pairs, 2)),
        units, members, splits, sample.hw, sample.c // group, sample.groups, sample.channels,
        bundles, bundle_groups, bundle_groups * sample.channels // group, blocks, config.columns // group,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    whole = config.columns // group == config.vectors(itemsize) and sample.c % (blocks * config.columns) == 0
    options = {
        "GROUP": group,
        "CV": config.vectors(itemsize),
        "LANES": 32 * config.num_warps,
        "CHUNKS": config.chunks,
        "PIECES": config.pieces,
        "EVEN": whole and sample.hw % config.slab_rows(itemsize) == 0,
        "LABELS": configs.most_touched(sample.channels, group),
        "SPAN": triton.next_power_of_2(min(bundle_groups, configs.most_touched(sample.channels, config.columns))),
        "OVERLAP": overlap,
        "SLOTS": triton.next_power_of_2(splits * overlap),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead,
        "EARLY": call.early,
        "num_warps": config.num_warps,
        **resident_options(config),
        **call.gradient_options,
    }
    return [
        *launches,
        Launch(group_norm_nhwc_backward_shared_kernel, (teams * members,), arguments, options),
        *_fold_parameters(call, partial, splits),
    ]


def _split(call: _Call, config: configs.BackwardSplit) -> list[Launch]:
    sample, itemsize = call.sample, call.x.element_size()
    vec = call.channel_vec
    parts = triton.cdiv(sample.hw, config.part_positions(itemsize))
    blocks = triton.cdiv(sample.channels, config.channels)
    walk = (
        parts, blocks, config.pieces, sample.hw // vec, sample.groups, sample.channels,
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


def _columns(call: _Call, config: configs.BackwardColumns) -> list[Launch]:
    sample = call.sample
    vec = vector_width(call.x.element_size(), sample.c)
    slab_rows = config.pieces * config.chunks * config.rows(vec)
    splits = triton.cdiv(sample.hw, slab_rows)
    blocks = triton.cdiv(sample.c, config.columns)
    walk = (
        splits, blocks, config.pieces, sample.hw, sample.c // vec, sample.groups, sample.channels,
        *dropout_arguments(call.epilogue),
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
    call: _Call,
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
        *call.inputs, call.affine_parameters, call.mean, call.rstd, parts[0], parts[1], *walk
    )  # fmt: skip
    fold_arguments = (
        parts[0], parts[1], call.weight, call.scale, sum_g, sum_g_xhat, sample.groups, sample.channels, splits
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, sum_g, sum_g_xhat,
        call.out.dx, *walk,
    )  # fmt: skip
    sums_options = {**options, "DY_OTHER": call.lies_otherwise(call.dy)}
    apply_options = {
        **sums_options,
        **dependent(call.early),
        "OUTSIDE_OTHER": call.lies_otherwise(call.dresidual_out),
    }
    return [
        *launches,
        Launch(sums_kernel, grid, sums_arguments, sums_options),
        Launch(
            group_norm_fold_sums_kernel,
            (sum_g.numel(),),
            fold_arguments,
            {**_sums_tile(splits, sample.channels), **dependent(call.early)},
        ),
        Launch(apply_kernel, grid, apply_arguments, apply_options),
        *_fold_parameters(call, (parts[0], parts[1]), splits),
    ]


def _sums_tile(splits: int, columns: int) -> dict[str, int]:
    """The tile in which one group's partial sums are folded, as wide as its columns where they fit."""
    block_columns = min(64, triton.next_power_of_2(columns))
    block_splits = min(configs.SUMS_BLOCK // block_columns, triton.next_power_of_2(splits))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": configs.SUMS_NUM_WARPS,
    }


def _fold_parameters(call: _Call, parts: tuple[Tensor | None, Tensor | None], splits: int) -> list[Launch]:
    """Gradients of parameters from partial sums [N, splits, C]; none for none.

    dbias and dweight in two steps where there are many samples, or where scale or shift want a sum for each sample.
    """
    dz, dz_xhat = parts
    out, c = call.out, call.sample.c
    if dz is None or all(t is None for t in (out.dbias, out.dweight, out.dscale, out.dshift)):
        return []
    tile = {"ROWS": configs.FOLD_ROWS, "COLUMNS": configs.FOLD_COLUMNS, "num_warps": configs.FOLD_NUM_WARPS}
    options = {**tile, **dependent(call.early)}
    blocks = triton.cdiv(c, configs.FOLD_COLUMNS)
    rows = call.n * splits
    launches = []
    affine = out.dbias is not None or out.dweight is not None
    if call.scale is not None or call.shift is not None:
        sums = dz.new_empty((2, call.n, c)) if affine else (None, None)
        of_samples = (
            dz, dz_xhat, call.weight, call.bias, call.scale, out.dscale, out.dshift, sums[0], sums[1], splits, c
        )  # fmt: skip
        launches.append(Launch(group_norm_fold_samples_kernel, (blocks, call.n), of_samples, options))
        dz, dz_xhat, rows = sums[0], sums[1], call.n
    if not affine:
        return launches
    if rows > configs.FOLD_TWICE_ABOVE:
        runs = configs.FOLD_RUNS
        fewer = call.x.new_empty((2, runs, c), dtype=torch.float32)
        of_runs = (dz, dz_xhat, fewer[0], fewer[1], rows, c, triton.cdiv(rows, runs))
        launches.append(Launch(group_norm_fold_rows_kernel, (blocks, runs), of_runs, options))
        dz, dz_xhat, rows = fewer[0], fewer[1], runs
    of_all = (dz, dz_xhat, out.dbias, out.dweight, rows, c, rows)
    return [*launches, Launch(group_norm_fold_rows_kernel, (blocks, 1), of_all, options)]
