"""The launches of a GroupNorm backward pass: a function for each algorithm, from checked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from fusednorm import group_norm_backward_launch as configs
from fusednorm._group_norm_fold_kernels import group_norm_fold_rows_kernel, group_norm_fold_sums_kernel
from fusednorm._group_norm_gradients import derivative_gain
from fusednorm._group_norm_nchw_backward_kernels import (
    group_norm_nchw_backward_apply_kernel,
    group_norm_nchw_backward_sums_kernel,
    group_norm_nchw_backward_tile_kernel,
)
from fusednorm._group_norm_nchw_backward_shared_kernels import group_norm_nchw_backward_shared_kernel
from fusednorm._group_norm_nhwc_backward_kernels import (
    group_norm_nhwc_backward_apply_kernel,
    group_norm_nhwc_backward_sums_kernel,
)
from fusednorm._group_norm_nhwc_backward_shared_kernels import group_norm_nhwc_backward_shared_kernel
from fusednorm.checks import Epilogue
from fusednorm.device import bulk_prefetch, multiprocessor_count
from fusednorm.group_norm_forward_plan import (
    dropout_arguments,
    empty_statistics,
    epilogue_options,
    plan_statistics,
)
from fusednorm.group_norm_launch import Sample, vector_width
from fusednorm.launch import REGISTERS_PER_SM, Launch, mailbox
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
) -> list[Launch]:
    """The launches of a backward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = _Call(dy, x, sample, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, out)
    match config or configs.choose_backward(sample, x.element_size(), multiprocessor_count(x.device)):
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

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.dy, self.x, self.residual

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias, self.mean, self.rstd

    @property
    def affine(self) -> bool:
        return self.weight is not None or self.bias is not None

    @property
    def channel_vec(self) -> int:
        """Elements of one access where channels are contiguous."""
        return vector_width(self.x.element_size(), self.sample.hw)

    @property
    def affine_parameters(self) -> tuple[Tensor | None, ...]:
        """What makes z of x_hat: weight, bias, scale, shift."""
        return self.weight, self.bias, None, None

    def can_prefetch(self, vec: int) -> bool:
        """Whether runs of `vec` elements of x and dy start and end on 16 bytes, and may be asked for."""
        return all(
            vec * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0 and bulk_prefetch(tensor.device)
            for tensor in (self.x, self.dy)
        )

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
        *call.inputs, call.dresidual_out, *call.parameters, call.out.dx, *parts,
        rows, sample.hw // vec, sample.groups, sample.channels, call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "ROWS": config.rows,
        "CHANNELS": config.channels,
        "POSITIONS": config.positions,
        "num_warps": config.num_warps,
        **epilogue_options(call.epilogue),
    }
    grid = (triton.cdiv(rows, config.rows),)
    return [
        Launch(group_norm_nchw_backward_tile_kernel, grid, arguments, options),
        *_fold_parameters(parts, call.out, call.n, sample.c),
    ]


def _shared(call: _Call, config: configs.BackwardShared) -> list[Launch]:
    call, launches = call.with_statistics()
    sample, itemsize = call.sample, call.x.element_size()
    vec = call.channel_vec
    members = config.members(sample, itemsize)
    parts = triton.cdiv(sample.hw, config.part_positions(itemsize))
    resident = multiprocessor_count(call.x.device) * config.programs_per_sm
    rows = call.n * sample.groups
    teams = min(rows, resident // members)
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
        "AHEAD": config.ahead if call.can_prefetch(vec) else 0,
        "GAIN": derivative_gain(call.epilogue.activation, itemsize),
        "num_warps": config.num_warps,
        **_resident_options(config),
        **epilogue_options(call.epilogue),
    }
    return [
        *launches,
        Launch(group_norm_nchw_backward_shared_kernel, (teams * members,), arguments, options),
        *_fold_parameters(partial, call.out, call.n * parts, sample.c),
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
    teams = min(units, multiprocessor_count(call.x.device) * config.programs_per_sm // members)
    depth = triton.next_power_of_2(triton.cdiv(config.lag, config.pieces))
    overlap = min(blocks, _most_touched(config.columns, sample.channels))
    partial = call.wanted_parts(splits)
    pairs = teams * depth * bundle_groups * (splits * overlap + 1)
    arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, call.out.dx, *partial,
        mailbox(call.x.device, triton.cdiv(pairs, 2)),
        units, members, splits, sample.hw, sample.c // group, sample.groups, sample.channels,
        bundles, bundle_groups, bundle_groups * sample.channels // group, blocks, config.columns // group, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    whole = config.columns // group == config.vectors(itemsize) and sample.c % (blocks * config.columns) == 0
    options = {
        "GROUP": group,
        "CV": config.vectors(itemsize),
        "LANES": 32 * config.num_warps,
        "CHUNKS": config.chunks,
        "PIECES": config.pieces,
        "EVEN": whole and sample.hw % config.slab_rows(itemsize) == 0,
        "LABELS": _most_touched(sample.channels, group),
        "SPAN": triton.next_power_of_2(min(bundle_groups, _most_touched(sample.channels, config.columns))),
        "OVERLAP": overlap,
        "SLOTS": triton.next_power_of_2(splits * overlap),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead,
        "GAIN": derivative_gain(call.epilogue.activation, itemsize),
        "num_warps": config.num_warps,
        **_resident_options(config),
        **epilogue_options(call.epilogue),
    }
    return [
        *launches,
        Launch(group_norm_nhwc_backward_shared_kernel, (teams * members,), arguments, options),
        *_fold_parameters(partial, call.out, call.n * splits, sample.c),
    ]


def _most_touched(size: int, window: int) -> int:
    """Intervals of `size`, one behind another, that a window at a multiple of its own size touches at most."""
    if window % size == 0:
        return window // size
    return 1 if size % window == 0 else (window - 2) // size + 2


def _resident_options(config: configs.BackwardShared | configs.BackwardBlocks) -> dict[str, object]:
    """Options of a launch whose programs wait for one another: all of them fit the registers, or none starts."""
    registers = REGISTERS_PER_SM // (32 * config.num_warps * config.programs_per_sm) // 8 * 8
    return {"maxnreg": min(255, registers), "launch_cooperative_grid": True}


def _split(call: _Call, config: configs.BackwardSplit) -> list[Launch]:
    vec, sample = call.channel_vec, call.sample
    splits = triton.cdiv(sample.hw // vec, config.run_units)
    runs = call.n * sample.c * splits
    walk = (
        runs, sample.hw // vec, sample.groups, sample.channels, splits, config.run_units,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "RUNS": config.runs,
        "UNITS": config.units,
        "num_warps": config.num_warps,
        **epilogue_options(call.epilogue),
    }
    grid = (triton.cdiv(runs, config.runs),)
    kernels = group_norm_nchw_backward_sums_kernel, group_norm_nchw_backward_apply_kernel
    return _sums_and_apply(call, kernels, grid, walk, options, splits)


def _columns(call: _Call, config: configs.BackwardColumns) -> list[Launch]:
    sample = call.sample
    vec = vector_width(call.x.element_size(), sample.c)
    splits = triton.cdiv(sample.hw, config.split_rows)
    blocks = triton.cdiv(sample.c, config.width)
    walk = (
        sample.hw, sample.c // vec, sample.groups, sample.channels, splits, config.split_rows, blocks,
        *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CV": config.width // vec,
        "ROWS": config.rows,
        "EVEN": sample.c % config.width == 0,
        "num_warps": config.num_warps,
        **epilogue_options(call.epilogue),
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
    """Sums of channels, their fold to groups, dx, and the fold to dweight and dbias."""
    call, launches = call.with_statistics()
    sample = call.sample
    parts = call.parts(splits)
    sum_g, sum_g_xhat = empty_statistics(call.x, sample)
    sums_kernel, apply_kernel = kernels
    sums_arguments = (*call.inputs, *call.parameters, parts[0], parts[1], *walk)
    fold_arguments = (
        parts[0], parts[1], call.weight, sum_g, sum_g_xhat, sample.groups, sample.channels, splits
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, *call.parameters, sum_g, sum_g_xhat, call.out.dx, *walk
    )  # fmt: skip
    return [
        *launches,
        Launch(sums_kernel, grid, sums_arguments, options),
        Launch(
            group_norm_fold_sums_kernel,
            (sum_g.numel(),),
            fold_arguments,
            _sums_tile(splits, sample.channels),
        ),
        Launch(apply_kernel, grid, apply_arguments, options),
        *_fold_parameters((parts[0], parts[1]), call.out, call.n * splits, sample.c),
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


def _fold_parameters(parts: tuple[Tensor | None, Tensor | None], out: Backward, rows: int, c: int) -> list[Launch]:
    """dbias and dweight from their partial rows, in two steps where there are many; nothing for neither."""
    dz, dz_xhat = parts
    if dz is None or (out.dbias is None and out.dweight is None):
        return []
    options = {
        "ROWS": configs.FOLD_ROWS,
        "COLUMNS": configs.FOLD_COLUMNS,
        "num_warps": configs.FOLD_NUM_WARPS,
    }
    blocks = triton.cdiv(c, configs.FOLD_COLUMNS)
    if rows <= configs.FOLD_TWICE_ABOVE:
        arguments = (dz, dz_xhat, out.dbias, out.dweight, rows, c, rows)
        return [Launch(group_norm_fold_rows_kernel, (blocks, 1), arguments, options)]
    runs = configs.FOLD_RUNS
    fewer = dz.new_empty((2, runs, c))
    first = (dz, dz_xhat, fewer[0], fewer[1], rows, c, triton.cdiv(rows, runs))
    second = (fewer[0], fewer[1], out.dbias, out.dweight, runs, c, runs)
    return [
        Launch(group_norm_fold_rows_kernel, (blocks, runs), first, options),
        Launch(group_norm_fold_rows_kernel, (blocks, 1), second, options),
    ]
