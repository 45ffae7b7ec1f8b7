"""The launch of a forward pass of LayerNorm or RMSNorm over checked tensors."""

import sys

import torch
from torch import Tensor

from fusednorm.checks import Epilogue, has_heads
from fusednorm.device import multiprocessor_count, since_hopper
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import (
    ByRows,
    Launch,
    can_prefetch,
    counters,
    dependent,
    dropout_arguments,
    has_lane_a_thread,
    known_whole,
    known_whole_in_slabs,
    mailbox,
    registers_for,
    resident_options,
    vector_units,
)
from fusednorm.ops.layer_norm import choice as layer_norm_launch
from fusednorm.ops.layer_norm import configs
from fusednorm.ops.layer_norm import table as layer_norm_tables
from fusednorm.ops.layer_norm.call import grid, layout, most_programs, shared_options, tile_programs
from fusednorm.ops.layer_norm.forward.cooperative import layer_norm_forward_shared_kernel
from fusednorm.ops.layer_norm.forward.resident import layer_norm_forward_row_kernel
from fusednorm.ops.layer_norm.forward.split import (
    layer_norm_forward_parts_kernel,
    layer_norm_forward_slabs_kernel,
)
from fusednorm.ops.layer_norm.forward.tile import (
    layer_norm_forward_sweep_kernel,
    layer_norm_forward_tile_kernel,
)
from fusednorm.results import Forward


def plan_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    is_rms: bool,
    config: configs.Forward | None = None,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """The launches of a forward pass over checked [rows, cols] or [tokens, heads, cols] tensors into `out`.

    `config` overrides the table's choice, for benchmarks and compile checks.
    """
    config = config or layer_norm_launch.choose_forward(
        x.shape[-1],
        x.element_size(),
        multiprocessor_count(x.device),
        residual is not None,
        x.ndim == 3,
        x.shape[0] == 1,
    )
    outputs = (out.y, out.residual_out, out.mean, out.rstd)
    return forward_launches(x, weight, bias, eps, residual, epilogue, outputs, is_rms, config, weight_offset)


def forward_launches(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    outputs: tuple[Tensor | None, ...],
    is_rms: bool,
    config: configs.Forward,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """`plan_forward` into y, residual_out, mean and rstd; y None for the statistics alone."""
    if isinstance(config, configs.ForwardParts):
        return _in_parts(x, weight, bias, eps, residual, epilogue, outputs, is_rms, config, weight_offset)
    rows, cols = x.shape[0], x.shape[-1]
    heads, strides = layout(config, cols, has_heads(weight, bias), x, residual)
    vec = vector_units(cols, *strides)
    tensors = (x, residual, weight, bias, *outputs)
    access = _access(cols, vec, x)
    # Narrow accesses are not merged at all.
    merges_as_equals = bool(access["NARROW"]) or has_lane_a_thread(min(16, vec * x.element_size()), *tensors)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps, *dropout_arguments(epilogue))
    options = {
        "BLOCK_N": config.block_n,
        "IS_RMS": is_rms,
        "HEADS": heads,
        "num_warps": config.num_warps,
        **shared_options(vec, weight_offset, epilogue),
    }
    match config:
        case configs.ForwardTile():
            column_bytes = x.element_size() + (0 if residual is None else residual.element_size())
            config = layer_norm_launch.within_shared_memory(config, column_bytes)
            options |= {
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n,
                "ROWS": config.rows,
                "STAGES": config.stages,
            }
            arguments = (*tensors, rows, *sizes)
            by_rows = ByRows(config.rows, most_programs(x, config), argument=True) if x.ndim == 2 else None
            programs = grid(tile_programs(x, config), x)
            return [Launch(layer_norm_forward_tile_kernel, programs, arguments, options, by_rows)]
        case configs.ForwardRow():
            options |= {
                "FULL": known_whole(cols, config.block_n, config.chunks, merges_as_equals),
                "CHUNKS": config.chunks,
                **access,
                "PREFETCH": heads == "none" and can_prefetch(vec, x, weight, bias, residual),
                "ALONE": config.programs_per_sm == 1,
                "maxnreg": registers_for(config),
            }
            arguments = (*tensors, config.ahead_per_sm * multiprocessor_count(x.device), *sizes)
            return [Launch(layer_norm_forward_row_kernel, grid(rows, x), arguments, options, _row_a_program(x))]
        case configs.ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": 16 // x.element_size()}
            options["PREFETCH"] = heads == "none" and can_prefetch(vec, x, weight, bias, residual)
            arguments = (*tensors, config.ahead_per_sm * multiprocessor_count(x.device), *sizes)
            return [Launch(layer_norm_forward_sweep_kernel, grid(rows, x), arguments, options, _row_a_program(x))]
        case configs.ForwardShared():
            slab = config.chunks * config.block_n
            members = cdiv(cols, slab)
            resident = multiprocessor_count(x.device) * config.programs_per_sm
            sharing = min(rows, resident // members) * members
            depth = next_power_of_2(2 * config.lag)
            del options["HEADS"]
            options |= {
                "FULL": known_whole_in_slabs(cols, config.block_n, config.chunks, merges_as_equals),
                **_slots(cols, slab, config),
                "CHUNKS": config.chunks,
                **access,
                "DEPTH": depth,
                "LAG": config.lag,
                "AHEAD": config.ahead if can_prefetch(vec, x, residual) else 0,
                **resident_options(config),
            }
            box = mailbox(x.device, depth * sharing)
            arguments = (*tensors, box, rows, members, *sizes)
            return [Launch(layer_norm_forward_shared_kernel, (sharing,), arguments, options)]


def _in_parts(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    outputs: tuple[Tensor | None, ...],
    is_rms: bool,
    config: configs.ForwardParts,
    weight_offset: float,
) -> list[Launch]:
    rows, cols = x.shape
    y, residual_out, mean, rstd = outputs
    _, strides = layout(config, cols, False, x, residual)
    vec = vector_units(cols, *strides)
    units = tuple(stride // vec for stride in strides)
    shared = shared_options(vec, weight_offset, epilogue) | {"GROUP": 16 // x.element_size(), "IS_RMS": is_rms}
    early = y is not None and since_hopper(x.device)
    prefetches = can_prefetch(vec, x, residual)
    lane_a_thread = has_lane_a_thread(min(16, vec * x.element_size()), x, residual)

    piece = config.chunks * config.block_n
    part = piece * cdiv(cols, piece * layer_norm_launch.MAX_PARTS)
    parts = cdiv(cols, part)
    slots = next_power_of_2(parts)
    parts_a_program = layer_norm_launch.choose_parts_a_program(rows * parts)
    of_parts = x.new_empty((rows, parts, 4), dtype=torch.float32)
    of_rows = None if y is None else x.new_empty((rows, 4), dtype=torch.float32)
    statistics = Launch(
        layer_norm_forward_parts_kernel,
        (rows * cdiv(parts, parts_a_program),),
        (
            x, residual, mean, rstd, of_rows, of_parts, counters(x.device, rows),
            parts, parts_a_program, part // vec, cols // vec, *units, eps,
        ),
        {
            "FULL": known_whole_in_slabs(cols, config.block_n, config.chunks, lane_a_thread),
            "EQUAL_PARTS": cols == part * slots and slots <= 32 * config.num_warps,
            "BLOCK_N": config.block_n,
            "CHUNKS": config.chunks,
            "SLOTS": slots,
            "PREFETCH": prefetches,
            "EARLY": early,
            "num_warps": config.num_warps,
            **{name: shared[name] for name in ("VEC", "GROUP", "IS_RMS", "FAST")},
        },
    )  # fmt: skip
    if y is None:
        return [statistics]

    block = 256 * config.slab_num_warps
    slab = config.slab_chunks * block
    row_tiles = cdiv(rows, config.rows)
    return [
        statistics,
        Launch(
            layer_norm_forward_slabs_kernel,
            (cdiv(cols, slab) * row_tiles,),
            (
                x, residual, weight, bias, y, residual_out, of_rows, rows, row_tiles, cols // vec, *units,
                *dropout_arguments(epilogue),
            ),
            {
                "FULL": 0 if cols % slab else config.chunks,
                "BLOCK_N": block,
                "CHUNKS": config.slab_chunks,
                "ROWS": config.rows,
                "PREFETCH": prefetches,
                "num_warps": config.slab_num_warps,
                **shared,
                **dependent(early),
            },
        ),
    ]  # fmt: skip


def _slots(cols: int, slab: int, config: configs.ForwardShared) -> dict[str, object]:
    """How the moments of programs that share a row are merged: a lane for each, all of equal weight or not."""
    slots = next_power_of_2(cdiv(cols, slab))
    return {"SLOTS": slots, "EQUAL_SLABS": cols == slab * slots and slots <= 32 * config.num_warps}


def _access(cols: int, vec: int, x: Tensor) -> dict[str, object]:
    """How many columns a thread loads at once, and whether those are taken as fewer than 16 bytes.

    Where a row may also come in parts, its bits must be those of the parts.
    """
    group = 16 // x.element_size()
    narrow = vec < group and cols < layer_norm_tables.SINGLE_ROW_COLS
    return {"GROUP": vec if narrow else group, "NARROW": narrow}


def _row_a_program(x: Tensor) -> ByRows | None:
    return ByRows(1, sys.maxsize, argument=False) if x.ndim == 2 else None
