"""The launches of a backward pass of LayerNorm or RMSNorm over checked tensors."""

import torch
from torch import Tensor

from fusednorm.checks import Epilogue, has_heads
from fusednorm.device import multiprocessor_count, since_hopper
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import (
    Launch,
    can_prefetch,
    dependent,
    dropout_arguments,
    mailbox,
    resident_options,
    vector_units,
)
from fusednorm.ops.layer_norm import choice as layer_norm_launch
from fusednorm.ops.layer_norm import configs
from fusednorm.ops.layer_norm.backward.cooperative import layer_norm_backward_shared_kernel
from fusednorm.ops.layer_norm.backward.reduce import fold_partials_kernel
from fusednorm.ops.layer_norm.backward.split import (
    layer_norm_backward_rows_kernel,
    layer_norm_backward_slab_kernel,
)
from fusednorm.ops.layer_norm.backward.tile import layer_norm_backward_tile_kernel
from fusednorm.ops.layer_norm.call import grid, layout, shared_options, tile_programs
from fusednorm.ops.layer_norm.forward.plan import forward_launches
from fusednorm.results import Backward


def plan_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    out: Backward,
    is_rms: bool,
    config: configs.Backward | None = None,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """The launches of a backward pass over checked [rows, cols] or [tokens, heads, cols] tensors into `out`.

    Workspaces are allocated.  `config` overrides the table's choice, for benchmarks and compile checks.
    """
    rows, cols = x.shape[0], x.shape[-1]
    plain = residual is None and epilogue.activation == "none" and not epilogue.dropout
    multiprocessors = multiprocessor_count(x.device)
    config = config or layer_norm_launch.choose_backward(cols, x.element_size(), multiprocessors, plain)
    heads, strides = layout(config, cols, has_heads(weight, bias), dy, x, residual, dresidual_out)
    vec = vector_units(cols, *strides)
    units = tuple(stride // vec for stride in strides)
    dropout = dropout_arguments(epilogue)
    shared = shared_options(vec, weight_offset, epilogue)
    tensors = (dy, x, residual, dresidual_out, weight, bias)
    gradients = (out.dx, None if out.dresidual is out.dx else out.dresidual)
    sizes = (rows, cols // vec, *units)
    folds = [t for t in (weight, bias) if t is not None]
    options = {"BLOCK_N": config.block_n, "num_warps": config.num_warps, **shared}
    early_fold = bool(folds) and since_hopper(x.device)
    match config:
        case configs.BackwardTile():
            pipelined = [t for t in (dy, x, residual, dresidual_out) if t is not None]
            if not config.hold_weight:
                pipelined += [t for t in (weight, bias if epilogue.activation != "none" else None) if t is not None]
            config = layer_norm_launch.within_shared_memory(config, sum(t.element_size() for t in pipelined))
            programs = tile_programs(x, config)
            most_partials = multiprocessors * config.programs_per_sm
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, programs)
            options |= {
                "EVEN": cols == config.chunks * config.block_n,
                "CHUNKS": config.chunks,
                "ROWS": config.rows,
                "STAGES": config.stages,
                "AHEAD": config.ahead if strides[:2] == (cols, cols) and can_prefetch(vec, x, dy) else 0,
                "EARLY_FOLD": early_fold,
                "HOLD_WEIGHT": config.hold_weight,
                "IS_RMS": is_rms,
                "HEADS": heads,
            }
            arguments = (*tensors, mean, rstd, *gradients, dweight_partial, dbias_partial, *sizes, eps, *dropout)
            launches = [Launch(layer_norm_backward_tile_kernel, grid(programs, x), arguments, options)]
        case configs.BackwardShared():
            launches = []
            if rstd is None:
                rstd = x.new_empty(rows, dtype=torch.float32)
                mean = None if is_rms else torch.empty_like(rstd)
                outputs = (None, None, mean, rstd)
                statistics = layer_norm_launch.choose_statistics(
                    cols, x.element_size(), multiprocessors, residual is not None
                )
                launches += forward_launches(x, None, None, eps, residual, Epilogue(), outputs, is_rms, statistics)
            members = cdiv(cols, config.block_n)
            resident = multiprocessors * config.programs_per_sm
            most_partials = resident // members
            groups = min(rows, most_partials)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, groups)
            depth = next_power_of_2(2 * config.lag)
            options |= {
                "EVEN": cols % config.block_n == 0,
                "SLOTS": next_power_of_2(members),
                "DEPTH": depth,
                "LAG": config.lag,
                "AHEAD": config.ahead if can_prefetch(vec, x, dy) else 0,
                "EARLY_FOLD": early_fold,
                "IS_RMS": is_rms,
                **resident_options(config),
            }
            box = mailbox(x.device, depth * groups * members)
            arguments = (
                *tensors, mean, rstd, *gradients, dweight_partial, dbias_partial, box, rows, members,
                *sizes[1:], *dropout,
            )  # fmt: skip
            launches += [Launch(layer_norm_backward_shared_kernel, (groups * members,), arguments, options)]
        case configs.BackwardSlab():
            slabs = cdiv(cols, config.block_n)
            resident = multiprocessors * config.programs_per_sm
            most_partials = max(1, resident // slabs)
            tiles = min(cdiv(rows, config.rows), most_partials)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, tiles)
            constants = x.new_empty((rows, 4), dtype=torch.float32)
            rows_arguments = (
                dy, x, residual, weight, bias, mean, rstd, constants, cols // vec, *units[:3], eps, *dropout,
            )  # fmt: skip
            rows_options = {
                "BLOCK_N": config.rows_block_n,
                "GROUP": 16 // x.element_size(),
                "EVEN": cols % config.rows_block_n == 0,
                "IS_RMS": is_rms,
                "num_warps": config.rows_num_warps,
                **shared,
            }
            even = cols % config.block_n == 0
            options |= {"ROWS": config.rows, "STAGES": config.stages, "EVEN": even}
            arguments = (*tensors, constants, *gradients, dweight_partial, dbias_partial, *sizes, *dropout)
            launches = [
                Launch(layer_norm_backward_rows_kernel, (rows,), rows_arguments, rows_options),
                Launch(layer_norm_backward_slab_kernel, (slabs, tiles), arguments, options),
            ]
    if folds:
        size = folds[0].numel()
        tile = layer_norm_launch.choose_fold(most_partials)
        launches.append(
            Launch(
                fold_partials_kernel,
                (cdiv(size, tile["BLOCK_N"]), len(folds)),
                (dweight_partial, dbias_partial, out.dweight, out.dbias, partials, size),
                tile | dependent(early_fold),
            )
        )
    return launches


def _partials(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, programs: int
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many partial gradients `programs` programs leave, for each head if x has heads, and workspaces for those
    of weight and of bias.
    """
    # Room for a multiple of 16 bytes each, so that both are aligned whatever the number of programs.
    room = cdiv(programs, 4) * 4
    both = x.new_empty(((weight is not None) + (bias is not None), room, *x.shape[1:]), dtype=torch.float32)
    count = programs
    if x.ndim == 3 and not has_heads(weight, bias):
        count *= x.shape[1]
    return count, None if weight is None else both[0], None if bias is None else both[-1]
