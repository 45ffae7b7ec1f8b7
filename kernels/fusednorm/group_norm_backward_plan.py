"""The launches of a GroupNorm backward pass: a function for each algorithm, from checked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from fusednorm import group_norm_launch as launch
from fusednorm._group_norm_fold_kernels import group_norm_fold_rows_kernel, group_norm_fold_sums_kernel
from fusednorm._group_norm_nchw_backward_kernels import (
    group_norm_nchw_backward_apply_kernel,
    group_norm_nchw_backward_sums_kernel,
    group_norm_nchw_backward_sweep_kernel,
    group_norm_nchw_backward_tile_kernel,
)
from fusednorm._group_norm_nhwc_backward_kernels import (
    group_norm_nhwc_backward_apply_kernel,
    group_norm_nhwc_backward_slab_kernel,
    group_norm_nhwc_backward_sums_kernel,
)
from fusednorm.checks import Epilogue
from fusednorm.group_norm_forward_plan import (
    dropout_arguments,
    empty_statistics,
    epilogue_options,
    fold_tile,
    plan_statistics,
    register_cap,
)
from fusednorm.group_norm_launch import Sample
from fusednorm.launch import Launch
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
    config: launch.Backward | None = None,
) -> list[Launch]:
    """The launches of a backward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = _Call(dy, x, sample, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, out)
    match config or launch.choose_backward(sample, x.element_size()):
        case launch.BackwardTile() as tile:
            return _tile(call, tile)
        case launch.BackwardSweep() as sweep:
            return _sweep(call, sweep)
        case launch.BackwardSplit() as split:
            return _split(call, split)
        case launch.BackwardSlab() as slab:
            return _slab(call, slab)
        case launch.BackwardColumns() as columns:
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
        return launch.vector_width(self.x.element_size(), self.sample.hw)

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


def _tile(call: _Call, config: launch.BackwardTile) -> list[Launch]:
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


def _sweep(call: _Call, config: launch.BackwardSweep) -> list[Launch]:
    vec, sample = call.channel_vec, call.sample
    splits = triton.cdiv(sample.hw // vec, config.run_units)
    parts = call.wanted_parts(splits)
    arguments = (
        *call.inputs, call.dresidual_out, *call.parameters, call.out.dx, *parts,
        sample.hw // vec, sample.groups, sample.channels, splits, config.run_units,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "RUNS": config.runs,
        "UNITS": config.units,
        "num_warps": config.num_warps,
        # Statistics taken in the kernel do not fit under the cap.
        **register_cap(None if call.mean is None else config.max_registers, call.epilogue, call.residual),
        **epilogue_options(call.epilogue),
    }
    return [
        Launch(group_norm_nchw_backward_sweep_kernel, (call.n * sample.groups,), arguments, options),
        *_fold_parameters(parts, call.out, call.n * splits, sample.c),
    ]


def _split(call: _Call, config: launch.BackwardSplit) -> list[Launch]:
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


def _slab(call: _Call, config: launch.BackwardSlab) -> list[Launch]:
    sample = call.sample
    columns = config.slab_groups * sample.channels
    vec = launch.vector_width(call.x.element_size(), sample.c, columns)
    slabs = triton.cdiv(sample.groups, config.slab_groups)
    parts = call.wanted_parts(1)
    arguments = (
        *call.inputs, call.dresidual_out, *call.parameters, call.out.dx, *parts,
        sample.hw, sample.c // vec, sample.groups, sample.channels, config.slab_groups, slabs,
        call.eps, *dropout_arguments(call.epilogue),
    )  # fmt: skip
    options = {
        "VEC": vec,
        "CV": config.width // vec,
        "ROWS": config.rows,
        "EVEN": columns % config.width == 0 and sample.c % columns == 0,
        "num_warps": config.num_warps,
        **epilogue_options(call.epilogue),
    }
    return [
        Launch(group_norm_nhwc_backward_slab_kernel, (call.n * slabs,), arguments, options),
        *_fold_parameters(parts, call.out, call.n, sample.c),
    ]


def _columns(call: _Call, config: launch.BackwardColumns) -> list[Launch]:
    sample = call.sample
    vec = launch.vector_width(call.x.element_size(), sample.c)
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
            fold_tile(splits, sample.channels),
        ),
        Launch(apply_kernel, grid, apply_arguments, options),
        *_fold_parameters((parts[0], parts[1]), call.out, call.n * splits, sample.c),
    ]


def _fold_parameters(parts: tuple[Tensor | None, Tensor | None], out: Backward, rows: int, c: int) -> list[Launch]:
    """dbias and dweight from their partial rows, in two steps where there are many; nothing for neither."""
    dz, dz_xhat = parts
    if dz is None or (out.dbias is None and out.dweight is None):
        return []
    options = {
        "ROWS": launch.FOLD_ROWS,
        "COLUMNS": launch.FOLD_COLUMNS,
        "num_warps": launch.FOLD_ROWS_NUM_WARPS,
    }
    blocks = triton.cdiv(c, launch.FOLD_COLUMNS)
    if rows <= launch.FOLD_TWICE_ABOVE:
        arguments = (dz, dz_xhat, out.dbias, out.dweight, rows, c, rows)
        return [Launch(group_norm_fold_rows_kernel, (blocks, 1), arguments, options)]
    runs = launch.FOLD_RUNS
    fewer = dz.new_empty((2, runs, c))
    first = (dz, dz_xhat, fewer[0], fewer[1], rows, c, triton.cdiv(rows, runs))
    second = (fewer[0], fewer[1], out.dbias, out.dweight, runs, c, runs)
    return [
        Launch(group_norm_fold_rows_kernel, (blocks, runs), first, options),
        Launch(group_norm_fold_rows_kernel, (blocks, 1), second, options),
    ]
