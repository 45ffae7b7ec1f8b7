"""The launches of a LayerNorm or RMSNorm pass over checked tensors: configuration, grid, workspaces, arguments."""

import sys

import torch
import triton
from torch import Tensor

from fusednorm import launch
from fusednorm._layer_norm_backward_kernels import fold_partials_kernel, layer_norm_backward_tile_kernel
from fusednorm._layer_norm_backward_shared_kernels import layer_norm_backward_shared_kernel
from fusednorm._layer_norm_backward_slab_kernels import (
    layer_norm_backward_rows_kernel,
    layer_norm_backward_slab_kernel,
)
from fusednorm._layer_norm_forward_kernels import (
    layer_norm_forward_sweep_kernel,
    layer_norm_forward_tile_kernel,
)
from fusednorm._layer_norm_forward_row_kernels import layer_norm_forward_row_kernel
from fusednorm._layer_norm_forward_shared_kernels import (
    layer_norm_forward_pieces_kernel,
    layer_norm_forward_shared_kernel,
)
from fusednorm.checks import Epilogue, has_heads
from fusednorm.device import INTERPRETED, bulk_prefetch, multiprocessor_count
from fusednorm.epilogue import dropout_threshold
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch import ByRows, Launch
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
    config = config or launch.choose_forward(
        x.shape[-1], x.element_size(), multiprocessor_count(x.device), residual is not None, x.ndim == 3
    )
    outputs = (out.y, out.residual_out, out.mean, out.rstd)
    return [_forward_launch(x, weight, bias, eps, residual, epilogue, outputs, is_rms, config, weight_offset)]


def _forward_launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    outputs: tuple[Tensor | None, ...],
    is_rms: bool,
    config: launch.Forward,
    weight_offset: float = 0.0,
) -> Launch:
    """One forward launch; `outputs` are y, residual_out, mean and rstd, y None for the statistics alone."""
    rows, cols = x.shape[0], x.shape[-1]
    heads, strides = _layout(config, cols, has_heads(weight, bias), x, residual)
    vec = launch.vector_units(cols, *strides)
    tensors = (x, residual, weight, bias, *outputs)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps, *dropout_arguments(epilogue))
    options = {
        "BLOCK_N": config.block_n,
        "IS_RMS": is_rms,
        "HEADS": heads,
        "num_warps": config.num_warps,
        **shared_options(vec, weight_offset, epilogue),
    }
    match config:
        case launch.ForwardTile():
            column_bytes = x.element_size() + (0 if residual is None else residual.element_size())
            config = launch.within_shared_memory(config, column_bytes)
            options |= {
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n,
                "ROWS": config.rows,
                "STAGES": config.stages,
            }
            arguments = (*tensors, rows, *sizes)
            by_rows = ByRows(config.rows, _most_programs(x, config), argument=True) if x.ndim == 2 else None
            grid = _grid(_tile_programs(x, config), x)
            return Launch(layer_norm_forward_tile_kernel, grid, arguments, options, by_rows)
        case launch.ForwardRow():
            options |= {
                "EVEN": cols == config.chunks * config.block_n,
                "CHUNKS": config.chunks,
                "GROUP": 16 // x.element_size(),
                "PREFETCH": heads == "none" and _can_prefetch(vec, x, weight, bias),
                "maxnreg": _registers(config),
            }
            arguments = (*tensors, config.ahead_per_sm * multiprocessor_count(x.device), *sizes)
            return Launch(layer_norm_forward_row_kernel, _grid(rows, x), arguments, options, _row_a_program(x))
        case launch.ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": 16 // x.element_size()}
            options["PREFETCH"] = heads == "none" and _can_prefetch(vec, x, weight, bias)
            arguments = (*tensors, config.ahead_per_sm * multiprocessor_count(x.device), *sizes)
            return Launch(layer_norm_forward_sweep_kernel, _grid(rows, x), arguments, options, _row_a_program(x))
        case launch.ForwardShared():
            slab = config.chunks * config.block_n
            members = triton.cdiv(cols, slab)
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            programs = min(rows, resident // members) * members
            depth = triton.next_power_of_2(2 * config.lag)
            del options["HEADS"]
            options |= {
                "EVEN": cols % slab == 0,
                **_slots(cols, slab, config),
                "CHUNKS": config.chunks,
                "GROUP": 16 // x.element_size(),
                "DEPTH": depth,
                "LAG": config.lag,
                "AHEAD": config.ahead if _can_prefetch(vec, x) else 0,
                **_resident_options(config),
            }
            mailbox = launch.mailbox(x.device, depth * programs)
            arguments = (*tensors, mailbox, rows, members, *sizes)
            return Launch(layer_norm_forward_shared_kernel, (programs,), arguments, options)
        case launch.ForwardPieces():
            piece = config.chunks * config.block_n
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            slab = piece * triton.cdiv(cols, piece * resident)
            members = triton.cdiv(cols, slab)
            programs = min(rows, resident // members) * members
            del options["HEADS"]
            options |= {
                "EVEN": cols % piece == 0,
                **_slots(cols, slab, config),
                "CHUNKS": config.chunks,
                "GROUP": 16 // x.element_size(),
                "PREFETCH": _can_prefetch(vec, x),
                **_resident_options(config),
            }
            arguments = (*tensors, launch.mailbox(x.device, 2 * programs), rows, members, slab // vec, *sizes)
            return Launch(layer_norm_forward_pieces_kernel, (programs,), arguments, options)


def _slots(cols: int, slab: int, config: launch.ForwardShared | launch.ForwardPieces) -> dict[str, object]:
    """How the moments of programs that share a row are merged: a lane for each, all of equal weight or not."""
    slots = triton.next_power_of_2(triton.cdiv(cols, slab))
    return {"SLOTS": slots, "EQUAL_SLABS": cols == slab * slots and slots <= 32 * config.num_warps}


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
    plain = residual is None and epilogue.activation == "none" and not epilogue.dropout
    config = config or launch.choose_backward(cols, x.element_size(), multiprocessor_count(x.device), plain)
    heads, strides = _layout(config, cols, has_heads(weight, bias), dy, x, residual, dresidual_out)
    vec = launch.vector_units(cols, *strides)
    units = tuple(stride // vec for stride in strides)
    dropout = dropout_arguments(epilogue)
    shared = shared_options(vec, weight_offset, epilogue)
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
            programs = _tile_programs(x, config)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, programs)
            options |= {
                "EVEN": cols == config.block_n,
                "ROWS": config.rows,
                "STAGES": config.stages,
                "HOLD_WEIGHT": config.hold_weight,
                "IS_RMS": is_rms,
                "HEADS": heads,
            }
            arguments = (*tensors, mean, rstd, *gradients, dweight_partial, dbias_partial, *sizes, eps, *dropout)
            launches = [Launch(layer_norm_backward_tile_kernel, _grid(programs, x), arguments, options)]
        case launch.BackwardShared():
            launches = []
            if rstd is None:
                rstd = x.new_empty(rows, dtype=torch.float32)
                mean = None if is_rms else torch.empty_like(rstd)
                outputs = (None, None, mean, rstd)
                statistics = launch.choose_statistics(
                    cols, x.element_size(), multiprocessor_count(x.device), residual is not None
                )
                launches.append(
                    _forward_launch(x, None, None, eps, residual, Epilogue(), outputs, is_rms, statistics)
                )
            members = triton.cdiv(cols, config.block_n)
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            groups = min(rows, resident // members)
            partials, dweight_partial, dbias_partial = _partials(x, weight, bias, groups)
            depth = triton.next_power_of_2(2 * config.lag)
            options |= {
                "EVEN": cols % config.block_n == 0,
                "SLOTS": triton.next_power_of_2(members),
                "DEPTH": depth,
                "LAG": config.lag,
                "AHEAD": config.ahead if _can_prefetch(vec, x, dy) else 0,
                "IS_RMS": is_rms,
                **_resident_options(config),
            }
            mailbox = launch.mailbox(x.device, depth * groups * members)
            arguments = (
                *tensors, mean, rstd, *gradients, dweight_partial, dbias_partial, mailbox, rows, members,
                *sizes[1:], *dropout,
            )  # fmt: skip
            launches.append(Launch(layer_norm_backward_shared_kernel, (groups * members,), arguments, options))
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


def _tile_programs(x: Tensor, config: launch.ForwardTile | launch.BackwardTile) -> int:
    """Programs of a tile kernel over x, for each head."""
    tiles: int = triton.cdiv(x.shape[0], config.rows)
    return max(1, min(tiles, _most_programs(x, config)))


def _most_programs(x: Tensor, config: launch.ForwardTile | launch.BackwardTile) -> int:
    """Programs of a tile kernel for each head of x, however many rows there are."""
    if not config.programs_per_sm:
            arguments = (*tensors, config.ahead_per_sm * multiprocessor_count(x.device), *sizes)
            return Launch(layer_norm_forward_row_kernel, _grid(rows, x), arguments, options, _row_a_program(x))


def _can_prefetch(vec: int, *tensors: Tensor | None) -> bool:
    """Whether rows of the tensors in vectors of `vec` elements start and end on 16 bytes, and may be asked for."""
    return all(
        tensor is None
        or (vec * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0 and bulk_prefetch(tensor.device))
        for tensor in tensors
    )


def _resident_options(
    config: launch.ForwardShared | launch.ForwardPieces | launch.BackwardShared,
) -> dict[str, object]:
    """Options of a launch whose programs wait for one another: all of them fit the registers, or none starts."""
    return {"maxnreg": _registers(config), "launch_cooperative_grid": True}


def _registers(
    config: launch.ForwardRow | launch.ForwardShared | launch.ForwardPieces | launch.BackwardShared,
) -> int:
    """Registers that a thread may have for `programs_per_sm` programs to be resident."""
    return min(255, launch.REGISTERS_PER_SM // (32 * config.num_warps * config.programs_per_sm) // 8 * 8)


def _partials(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, programs: int
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many partial gradients `programs` programs leave, for each head if x has heads, and workspaces for those
    of weight and of bias.
    """
    # Room for a multiple of 16 bytes each, so that both are aligned whatever the number of programs.
    room = triton.cdiv(programs, 4) * 4
    both = x.new_empty(((weight is not None) + (bias is not None), room, *x.shape[1:]), dtype=torch.float32)
    count = programs
    if x.ndim == 3 and not has_heads(weight, bias):
        count *= x.shape[1]
    return count, None if weight is None else both[0], None if bias is None else both[-1]


def _grid(programs: int, x: Tensor) -> tuple[int, ...]:
    return (programs,) if x.ndim == 2 else (programs, x.shape[1])


def row_strides(cols: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """Elements from row to row, or token to token; cols where it does not matter: it costs no vector width."""
    return tuple(cols if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) for tensor in tensors)


def _layout(
    config: launch.Forward | launch.Backward, cols: int, own_parameters: bool, *tensors: Tensor | None
) -> tuple[str, tuple[int, ...]]:
    """HEADS of `_row_heads` for [rows, cols] or [tokens, heads, cols] tensors, and the stride of each for it.

    Raises:
        UnsupportedShapeError: rows too long, too many heads, or heads that lie in no way that kernels walk.
    """
    if all(tensor is None or tensor.ndim == 2 for tensor in tensors):
        return "none", row_strides(cols, *tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    tokens, heads, _ = present[0].shape
    match config:
        case launch.ForwardTile() | launch.ForwardRow() | launch.ForwardSweep() | launch.BackwardTile():
            pass
        case _:
            raise UnsupportedShapeError(
                f"rows of {cols} columns are too long for two strides, and for heads with parameters of their own"
            )
    if heads > MAX_HEADS:
        raise UnsupportedShapeError(f"there must be at most {MAX_HEADS} heads, got {heads}")
    if heads == 1 or all(tensor.stride(1) == cols for tensor in present):
        return "own" if own_parameters else "shared", row_strides(cols, *tensors)
    if own_parameters and (tokens == 1 or all(tensor.stride(0) == heads * tensor.stride(1) for tensor in present)):
        return "own_uniform", tuple(cols if tensor is None else tensor.stride(1) for tensor in tensors)
    raise UnsupportedShapeError(
        f"the heads of every token must lie {cols} elements apart, or all rows one constant stride apart, "
        f"got strides {', '.join(str(list(tensor.stride())) for tensor in present)}"
    )


def dropout_arguments(epilogue: Epilogue) -> tuple[int, int, float]:
    """Seed, threshold and scale, as the kernels that fuse dropout take them."""
    return epilogue.seed or 0, dropout_threshold(epilogue.dropout), 1.0 / (1.0 - epilogue.dropout)


def shared_options(vec: int, weight_offset: float, epilogue: Epilogue) -> dict[str, object]:
    """Constexprs of every kernel with an epilogue whose sizes come in units of `vec` elements."""
    return {
        "VEC": vec,
        "WEIGHT_OFFSET": float(weight_offset),
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }
