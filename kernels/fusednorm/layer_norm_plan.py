"""The launches of a LayerNorm or RMSNorm pass over checked tensors: configuration, grid, workspaces, arguments."""

import torch
import triton
from torch import Tensor

from fusednorm import launch
from fusednorm._layer_norm_backward_kernels import fold_partials_kernel, layer_norm_backward_tile_kernel
from fusednorm._layer_norm_backward_slab_kernels import (
    layer_norm_backward_rows_kernel,
    layer_norm_backward_slab_kernel,
)
from fusednorm._layer_norm_forward_kernels import (
    layer_norm_forward_sweep_kernel,
    layer_norm_forward_tile_kernel,
)
from fusednorm.checks import Epilogue, has_heads
from fusednorm.device import INTERPRETED, multiprocessor_count
from fusednorm.epilogue import dropout_threshold
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch import Launch
from fusednorm.results import Backward, Forward

MAX_HEADS = 65535
"""They are a launch's second axis."""


def plan_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    is_rms: bool,
    config: launch.Forward | None = None,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """The launches of a forward pass over checked [rows, cols] or [tokens, heads, cols] tensors into `out`.

    `config` overrides the table's choice, for benchmarks and compile checks.
    """
    rows, cols = x.shape[0], x.shape[-1]
    config = config or launch.choose_forward(cols, x.element_size())
    if x.ndim == 2:
        heads, strides = "none", _row_strides(cols, x, residual)
    else:
        heads, strides = _head_layout(config, cols, has_heads(weight, bias), x, residual)
    vec = launch.vector_units(cols, *strides)
    tensors = (x, residual, weight, bias, out.y, out.residual_out, out.mean, out.rstd)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps, *_dropout_arguments(epilogue))
    options = {
        "BLOCK_N": config.block_n,
        "IS_RMS": is_rms,
        "HEADS": heads,
        "num_warps": config.num_warps,
        **_shared_options(vec, weight_offset, epilogue),
    }
    match config:
        case launch.ForwardTile():
            column_bytes = x.element_size() + (0 if residual is None else residual.element_size())
            config = launch.within_shared_memory(config, column_bytes)
            options |= {
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n * config.split,
            }
            programs, mailbox, tile_options = _residents(x, config)
            return [
                Launch(
                    layer_norm_forward_tile_kernel,
                    _grid(programs, x),
                    (*tensors, mailbox, rows, *sizes),
                    options | tile_options,
                )
            ]
        case launch.ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": 16 // x.element_size()}
            return [Launch(layer_norm_forward_sweep_kernel, _grid(rows, x), (*tensors, *sizes), options)]


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
    config: launch.Backward | None = None,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """The launches of a backward pass over checked [rows, cols] or [tokens, heads, cols] tensors into `out`.

    Workspaces are allocated.  `config` overrides the table's choice, for benchmarks and compile checks.
    """
    rows, cols = x.shape[0], x.shape[-1]
    config = config or launch.choose_backward(cols, x.element_size())
    if x.ndim == 2:
        heads, strides = "none", _row_strides(cols, dy, x, residual, dresidual_out)
    else:
        heads, strides = _head_layout(config, cols, has_heads(weight, bias), dy, x, residual, dresidual_out)
    vec = launch.vector_units(cols, *strides)
    units = tuple(stride // vec for stride in strides)
    dropout = _dropout_arguments(epilogue)
    shared = _shared_options(vec, weight_offset, epilogue)
    tensors = (dy, x, residual, dresidual_out, weight, bias)
    gradients = (out.dx, None if out.dresidual is out.dx else out.dresidual)
    sizes = (rows, cols // vec, *units)
    options = {
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        **shared,
    }
    match config:
        case launch.BackwardTile():
            pipelined = [t for t in (dy, x, residual, dresidual_out) if t is not None]
            if not config.hold_weight:
                pipelined += [t for t in (weight, bias if epilogue.activation != "none" else None) if t is not None]
            config = launch.within_shared_memory(config, sum(t.element_size() for t in pipelined))
            options["EVEN"] = cols == config.block_n * config.split
            programs, mailbox, tile_options = _residents(x, config)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, programs // config.split)
            options |= {"IS_RMS": is_rms, "HEADS": heads, "HOLD_WEIGHT": config.hold_weight, **tile_options}
            arguments = (
                *tensors, mean, rstd, *gradients, dweight_partial, dbias_partial, mailbox, *sizes, eps, *dropout,
            )  # fmt: skip
            launches = [Launch(layer_norm_backward_tile_kernel, _grid(programs, x), arguments, options)]
        case launch.BackwardSlab():
            slabs = triton.cdiv(cols, config.block_n)
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            tiles = min(triton.cdiv(rows, config.rows), max(1, resident // slabs))
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
    parameter = bias if weight is None else weight
    if parameter is not None:
        size = parameter.numel()
        launches.append(
            Launch(
                fold_partials_kernel,
                (triton.cdiv(size, launch.FOLD_BLOCK_N),),
                (dweight_partial, dbias_partial, out.dweight, out.dbias, partials, size),
                {
                    "BLOCK_P": launch.FOLD_BLOCK_P,
                    "BLOCK_N": launch.FOLD_BLOCK_N,
                    "num_warps": launch.FOLD_NUM_WARPS,
                },
            )
        )
    return launches


def _residents(
    x: Tensor, config: launch.ForwardTile | launch.BackwardTile
) -> tuple[int, Tensor | None, dict[str, object]]:
    """Programs of a persistent tile kernel, for each head of x, their mailbox, and the kernel's options."""
    groups = triton.cdiv(x.shape[0], config.rows)
    if config.programs_per_sm:
        resident = multiprocessor_count(x.device) * config.programs_per_sm
        if x.ndim == 3:
            resident //= x.shape[1]
        groups = max(1, min(groups, resident // config.split))
    options: dict[str, object] = {
        "ROWS": config.rows,
        "STAGES": config.stages,
        "SPLIT": config.split,
    }
    if config.split == 1:
        return groups, None, options
    programs = groups * config.split
    return (
        programs,
        launch.mailbox(x.device, programs),
        options | {"launch_cooperative_grid": True},
    )


def _partials(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, programs: int
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many partial gradients `programs` programs leave, for each head if x has heads, and workspaces for those
    of weight and of bias.
    """
    both = x.new_empty(((weight is not None) + (bias is not None), programs, *x.shape[1:]), dtype=torch.float32)
    count = programs
    if x.ndim == 3 and not has_heads(weight, bias):
        count *= x.shape[1]
    return count, None if weight is None else both[0], None if bias is None else both[-1]


def _grid(programs: int, x: Tensor) -> tuple[int, ...]:
    return (programs,) if x.ndim == 2 else (programs, x.shape[1])


def _row_strides(cols: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """Elements from row to row, or token to token; cols where it does not matter: it costs no vector width."""
    return tuple(cols if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) for tensor in tensors)


def _head_layout(
    config: launch.Forward | launch.Backward, cols: int, own_parameters: bool, *tensors: Tensor | None
) -> tuple[str, tuple[int, ...]]:
    """HEADS of `_row_heads` for [tokens, heads, cols] tensors, and the stride of each that it asks for.

    Raises:
        UnsupportedShapeError: rows too long, too many heads, or heads that lie in no way that kernels walk.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    tokens, heads, _ = present[0].shape
    match config:
        case launch.ForwardTile(split=1) | launch.ForwardSweep() | launch.BackwardTile(split=1):
            pass
        case _:
            raise UnsupportedShapeError(
                f"rows of {cols} columns are too long for two strides, and for heads with parameters of their own"
            )
    if heads > MAX_HEADS:
        raise UnsupportedShapeError(f"there must be at most {MAX_HEADS} heads, got {heads}")
    if heads == 1 or all(tensor.stride(1) == cols for tensor in present):
        return "own" if own_parameters else "shared", _row_strides(cols, *tensors)
    if own_parameters and (tokens == 1 or all(tensor.stride(0) == heads * tensor.stride(1) for tensor in present)):
        return "own_uniform", tuple(cols if tensor is None else tensor.stride(1) for tensor in tensors)
    raise UnsupportedShapeError(
        f"the heads of every token must lie {cols} elements apart, or all rows one constant stride apart, "
        f"got strides {', '.join(str(list(tensor.stride())) for tensor in present)}"
    )


def _dropout_arguments(epilogue: Epilogue) -> tuple[int, int, float]:
    return epilogue.seed or 0, dropout_threshold(epilogue.dropout), 1.0 / (1.0 - epilogue.dropout)


def _shared_options(vec: int, weight_offset: float, epilogue: Epilogue) -> dict[str, object]:
    return {
        "VEC": vec,
        "WEIGHT_OFFSET": float(weight_offset),
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }
