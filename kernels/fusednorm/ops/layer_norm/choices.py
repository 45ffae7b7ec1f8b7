"""Planning of a pass of LayerNorm or RMSNorm: the choice of a configuration from the tables, and its launches.

The choice depends on the row length and the size of an element, but not on the number of rows: the bits of a row's
result do not depend on the other rows, and a new number of rows causes no compilation.  All row lengths up to the
limit of a table entry share its configuration, so the number of compiled kernels is bounded.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import TypeVar

from fusednorm.arguments.arrays import new_workspace
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch.launches import REGISTERS_PER_SM, Launch
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative, plan_cooperative_backward
from fusednorm.ops.layer_norm.backward.split import LayerNormBackwardSplit, plan_split_backward
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile, plan_tile_backward
from fusednorm.ops.layer_norm.call import (
    SINGLE_ROW_COLS,
    LayerNormBackwardCall,
    LayerNormForwardCall,
    RowStatistics,
)
from fusednorm.ops.layer_norm.chain import ChainCall, plan_sweep_chain, plan_tile_chain
from fusednorm.ops.layer_norm.channels_first import choices as channels_first
from fusednorm.ops.layer_norm.channels_first.backward.split import (
    ChannelsFirstBackwardSplit,
    plan_channels_split_backward,
)
from fusednorm.ops.layer_norm.channels_first.backward.tile import (
    ChannelsFirstBackwardTile,
    plan_channels_tile_backward,
)
from fusednorm.ops.layer_norm.channels_first.forward.sweep import (
    ChannelsFirstForwardSweep,
    plan_channels_sweep_forward,
)
from fusednorm.ops.layer_norm.channels_first.forward.tile import (
    ChannelsFirstForwardTile,
    plan_channels_tile_forward,
)
from fusednorm.ops.layer_norm.config_tables import BackwardConfig, ForwardConfig
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative, plan_cooperative_forward
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident, plan_resident_forward
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit, plan_split_forward
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep, plan_sweep_forward
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile, plan_tile_forward
from fusednorm.policy.cooperative_launches import may_wait

MOST_BYTES_WITH_RESIDUAL = 96 << 10
"""The largest row that one program holds with a residual: at 128 KB, only the next row's prefetch would overlap."""

MOST_COLS_WITH_GATE = 8192
"""The longest 16-bit row that a tile backward holds with a gate, which needs the sums of one more gradient and x.

From 8200 to 12288 columns, a thread would store 1.4 KB in local memory and load it again for each row, ten times
the bytes of the row; the parts of `LayerNormBackwardSplit` need no local memory.  On an H200, 8192 rows of 8200,
10240 and 12288 bfloat16 columns with residual, gate, scale, shift, weight and bias took 420, 451 and 511 us for
2564, 2610 and 2129, each measured once through autograd at 3e2a6231 (Triton 3.6); `python -m benchmarks --suite
adaptive` has a cell of the last.
"""

_REGISTERS_BESIDE = 48
"""The number of a thread's registers besides those for its part of the row."""

Config = TypeVar("Config", ForwardConfig, BackwardConfig)

AnyForwardConfig = ForwardConfig | channels_first.ChannelsFirstForwardConfig
AnyBackwardConfig = BackwardConfig | channels_first.ChannelsFirstBackwardConfig


def _iterate_entries_between(cols: int, table: tuple[tuple[int, int, Config], ...]) -> Iterator[Config]:
    return (choice for first, last, choice in table if first <= cols <= last)


def _iterate_unaligned_entries(
    cols: int, itemsize: int, table: dict[int, tuple[tuple[int, int, Config], ...]]
) -> Iterator[Config]:
    """Yield the entries of rows that are no multiple of 16 bytes; none if rows of `cols` columns are one."""
    return _iterate_entries_between(cols, table[itemsize] if cols * itemsize % 16 else ())


def _iterate_choices(
    cols: int,
    itemsize: int,
    table: dict[int, tuple[tuple[int, Config], ...]],
    unaligned: dict[int, tuple[tuple[int, int, Config], ...]],
) -> Iterator[Config]:
    """Yield the configurations that can process rows of `cols` columns, the best one first.

    The tables have an entry for all rows up to a length, so the entries for longer rows follow.  Rows that
    are no multiple of 16 bytes have entries of their own in `unaligned`, which are yielded first.
    """
    yield from _iterate_unaligned_entries(cols, itemsize, unaligned)
    yield from (choice for limit, choice in table[itemsize] if cols <= limit)


def choose_forward(
    cols: int,
    itemsize: int,
    multiprocessors: int,
    has_residual: bool,
    has_heads: bool = False,
    is_single_row: bool = False,
    is_modulated: bool = False,
    can_wait: bool = True,
) -> ForwardConfig:
    """Choose the forward configuration for rows of `cols` elements of `itemsize` bytes.

    A residual needs more registers.  Programs that share rows do not support heads.  A single row may use another
    algorithm than several rows, with the same bits.  With a scale and a shift for each sample, programs of short
    rows process several rows of a sample.  `can_wait`: whether the device's launches may be cooperative; the
    process's setting may forbid it, too.
    """
    can_wait = can_wait and may_wait()
    return _choose_forward(
        cols, itemsize, multiprocessors, has_residual, has_heads, is_single_row, is_modulated, can_wait
    )


@lru_cache(maxsize=4096)
def _choose_forward(
    cols: int,
    itemsize: int,
    multiprocessors: int,
    has_residual: bool,
    has_heads: bool,
    is_single_row: bool,
    is_modulated: bool,
    can_wait: bool,
) -> ForwardConfig:
    """Choose the forward configuration from the tables, and cache the choice.

    The arguments are those of `choose_forward`.  `can_wait`, whether programs may wait for one another, is an
    argument because the cached choice depends on that too.
    """
    choices = _iterate_choices(cols, itemsize, tables.FORWARD, tables.FORWARD_UNALIGNED)
    if has_residual:
        choices = chain(_iterate_entries_between(cols, tables.FORWARD_WITH_RESIDUAL[itemsize]), choices)
    if is_modulated:
        choices = chain(_iterate_entries_between(cols, tables.FORWARD_MODULATED[itemsize, has_residual]), choices)
    choice = next(choices)
    if isinstance(choice, LayerNormForwardResident) and has_residual:
        held = (
            _fit_programs_with_residual(choice, itemsize) if cols * itemsize <= MOST_BYTES_WITH_RESIDUAL else None
        )
        choice = held or next(c for c in choices if isinstance(c, LayerNormForwardCooperative))
    if isinstance(choice, LayerNormForwardCooperative):
        if has_heads:
            return choose_sweep(cols)
        if not can_wait:
            # For longer rows one program a row reaches 0.20 of a copy's speed, and parts 0.54 (bfloat16, 16 rows of
            # 2^20).
            return choose_sweep(cols) if cols < SINGLE_ROW_COLS else tables.FORWARD_SPLIT[itemsize]
        if has_residual:
            # A row is twice as large: with a lag of 3, 64 rows of 2^20 reached 0.65 of a copy's speed, with 2 0.75.
            choice = replace(choice, programs_per_sm=12 // choice.num_warps, lag=min(choice.lag, 2))
            if itemsize == 2 and cols % 2 and cols < SINGLE_ROW_COLS:
                # Elements are loaded one by one, each with an address: with four chunks a thread has 656 bytes in
                # local memory, with two none.  1500 rows of 50257 took 440 us with four, 298 with two (H100).
                choice = replace(choice, chunks=choice.chunks // 2, programs_per_sm=16 // choice.num_warps)
        shared = choice.chunks * choice.block_n * choice.programs_per_sm * multiprocessors
        if cols > shared or (is_single_row and cols >= SINGLE_ROW_COLS):
            return tables.FORWARD_SPLIT[itemsize]
    return choice


def _fit_programs_with_residual(choice: LayerNormForwardResident, itemsize: int) -> LayerNormForwardResident | None:
    """Reduce the number of resident programs of `choice` until each thread's registers suffice for a residual.
    Return the changed copy.

    The result is None if the registers do not suffice for one program.

    A residual doubles the bytes of a row, so a prefetch of one row per multiprocessor is enough: 1.01 of a
    copy's speed with one, 0.98 with two (8192 columns in bfloat16, 4096 in float32).
    """
    registers = 2 * choice.chunks * 2 * itemsize + _REGISTERS_BESIDE
    programs = REGISTERS_PER_SM // (32 * choice.num_warps * registers)
    if itemsize == 4:
        programs = max(1, programs)  # In float32 the sum replaces the row in its registers.
    if not programs:
        return None
    ahead = min(1, choice.prefetch_distance_per_sm)
    return replace(choice, programs_per_sm=min(choice.programs_per_sm, programs), prefetch_distance_per_sm=ahead)


def choose_statistics(
    cols: int, itemsize: int, multiprocessors: int, has_residual: bool, can_wait: bool = True
) -> ForwardConfig:
    """Choose the configuration of a pass that computes only mean and rstd."""
    choice = choose_forward(cols, itemsize, multiprocessors, has_residual, can_wait=can_wait)
    return choose_sweep(cols) if isinstance(choice, LayerNormForwardTile | LayerNormForwardResident) else choice


def choose_sweep(cols: int) -> LayerNormForwardSweep:
    """Choose the configuration that reads rows of `cols` columns twice; it is one for all dtypes."""
    block = min(1 << (cols.bit_length() - 2), 8192)
    return LayerNormForwardSweep(block, num_warps=max(1, block // 256))


def choose_backward(
    cols: int, itemsize: int, multiprocessors: int, is_plain: bool, can_wait: bool = True
) -> BackwardConfig:
    """Choose the backward configuration for rows of `cols` elements of `itemsize` bytes.

    `is_plain`: whether there is no residual, activation or dropout; each of these needs more registers.
    `can_wait`: as for `choose_forward`.
    """
    return _choose_backward(cols, itemsize, multiprocessors, is_plain, can_wait and may_wait())


@lru_cache(maxsize=4096)
def _choose_backward(
    cols: int, itemsize: int, multiprocessors: int, is_plain: bool, can_wait: bool
) -> BackwardConfig:
    """Choose the backward configuration from the tables, and cache the choice.

    The arguments are those of `choose_backward`.  `can_wait`, whether programs may wait for one another, is an
    argument because the cached choice depends on that too.
    """
    choice = next(_iterate_choices(cols, itemsize, tables.BACKWARD, tables.BACKWARD_UNALIGNED))
    if isinstance(choice, LayerNormBackwardCooperative):
        if not is_plain:
            # One program a multiprocessor could not hold rows of 2^20 columns, which reach 0.74 of a copy's speed
            # with a residual; in parts they reach 0.64.
            choice = replace(choice, programs_per_sm=max(2, choice.programs_per_sm - 1))
        if not can_wait or cols > choice.block_n * choice.programs_per_sm * multiprocessors:
            return tables.BACKWARD_SPLIT[itemsize]
    return choice


def find_float8_or_chain_tile(cols: int) -> LayerNormForwardTile | None:
    """Choose the tile of complete rows for a float8 pass or a chain of LayerNorms.

    The result is None if registers cannot hold a row of `cols` columns.
    """
    return next((tile for limit, tile in tables.TILES if cols <= limit), None)


def choose_float8(cols: int, itemsize: int) -> LayerNormForwardTile | LayerNormForwardSweep:
    """Choose the forward configuration for a float8 y and rows of `cols` elements of `itemsize` bytes."""
    sweeps = (sweep for limit, sweep in tables.FLOAT8_SWEEP[itemsize] if cols <= limit)
    return find_float8_or_chain_tile(cols) or next(sweeps)


def plan_forward(call: LayerNormForwardCall, config: AnyForwardConfig | None = None) -> list[Launch]:
    """Plan the launches of a forward pass by the algorithm that is chosen for its rows.

    `config` overrides the choice, for tests, benchmarks and compile checks.

    Raises:
        UnsupportedShapeError: y is float8, and channels are first in memory; or no kernel supports the heads.
    """
    config = config or _choose_forward_of_call(call)
    match config:
        case LayerNormForwardTile():
            return plan_tile_forward(call, config)
        case LayerNormForwardResident():
            return plan_resident_forward(call, config)
        case LayerNormForwardCooperative():
            return plan_cooperative_forward(call, config)
        case LayerNormForwardSplit():
            return plan_split_forward(call, config)
        case LayerNormForwardSweep():
            return plan_sweep_forward(call, config)
        case ChannelsFirstForwardTile():
            return plan_channels_tile_forward(call, config)
        case ChannelsFirstForwardSweep():
            return plan_channels_sweep_forward(call, config)


def _choose_forward_of_call(call: LayerNormForwardCall) -> AnyForwardConfig:
    """Choose the configuration of a forward pass.

    Raises:
        UnsupportedShapeError: y is float8, and channels are first in memory.
    """
    has_residual = call.residual is not None
    if call.is_channels_first:
        if call.y_scale is not None:
            raise UnsupportedShapeError(
                "a float8 y needs channels that are adjacent in memory: convert x to torch.channels_last"
            )
        return channels_first.choose_forward(call.cols, call.rows, call.itemsize, has_residual)
    if call.y_scale is not None:
        return choose_float8(call.cols, call.itemsize)
    return choose_forward(
        call.cols,
        call.itemsize,
        call.multiprocessors,
        has_residual,
        has_heads=call.x.ndim == 3,
        is_single_row=call.rows == 1,
        is_modulated=call.is_modulated,
        can_wait=call.x.device.has_launch_options,
    )


def plan_backward(call: LayerNormBackwardCall, config: AnyBackwardConfig | None = None) -> list[Launch]:
    """Plan the launches of a backward pass by the algorithm that is chosen for its rows.

    The list includes the computation of mean and rstd if the chosen kernel needs both and the call has
    neither.  `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    config = config or _choose_backward_of_call(call)
    if call.is_modulated and isinstance(config, LayerNormBackwardCooperative):
        # Its programs share rows without regard to samples.
        config = tables.BACKWARD_SPLIT[call.itemsize]
    match config:
        case LayerNormBackwardTile():
            return plan_tile_backward(call, config)
        case LayerNormBackwardCooperative():
            call.check_no_heads()
            call, statistics = _add_statistics(call)
            return statistics + plan_cooperative_backward(call, config)
        case LayerNormBackwardSplit():
            if config.divide_row(call)[0] == 1:
                return plan_split_backward(call, config)
            call, statistics = _add_statistics(call)
            return statistics + plan_split_backward(call, config)
        case ChannelsFirstBackwardTile():
            return plan_channels_tile_backward(call, config)
        case ChannelsFirstBackwardSplit():
            call, statistics = _add_statistics(call)
            return statistics + plan_channels_split_backward(call, config)


def _choose_backward_of_call(call: LayerNormBackwardCall) -> AnyBackwardConfig:
    """Choose the configuration of a backward pass."""
    if call.is_channels_first:
        return channels_first.choose_backward(call.cols, call.rows, call.itemsize, call.residual is not None)
    has_gate = call.gate is not None
    if has_gate and call.itemsize == 2 and call.cols > MOST_COLS_WITH_GATE:
        return tables.BACKWARD_SPLIT[call.itemsize]
    if has_gate or call.has_epilogue:
        table = tables.BACKWARD_WITH_GATE if has_gate else tables.BACKWARD_WITH_EPILOGUE
        special = next(_iterate_entries_between(call.cols, table[call.itemsize]), None)
        unaligned = next(_iterate_unaligned_entries(call.cols, call.itemsize, tables.BACKWARD_UNALIGNED), None)
        if special is not None and unaligned is None:
            return special
    can_wait = call.x.device.has_launch_options
    choice = choose_backward(call.cols, call.itemsize, call.multiprocessors, call.is_plain, can_wait)
    if isinstance(choice, LayerNormBackwardSplit):
        return _find_unshared_tile(call) or choice
    return choice


def _find_unshared_tile(call: LayerNormBackwardCall) -> LayerNormBackwardTile | None:
    """Find the tile that holds a row which programs cannot share; None if registers do not suffice."""
    is_light = call.options.is_rms or call.is_plain
    if call.x.ndim > 2 or not is_light or call.cols * call.itemsize % 16:
        return None
    return next((tile for limit, tile in tables.BACKWARD_UNSHARED[call.itemsize] if call.cols <= limit), None)


def plan_chain(call: ChainCall) -> list[Launch]:
    """Plan the launch of a chain of LayerNorms: on tiles if registers can hold a row, else in sweeps."""
    tile = find_float8_or_chain_tile(call.x.shape[1])
    if tile is not None:
        return plan_tile_chain(call, tile)
    return plan_sweep_chain(call, tables.CHAIN_SWEEP[call.x.element_size()])


def _add_statistics(call: LayerNormBackwardCall) -> tuple[LayerNormBackwardCall, list[Launch]]:
    """Return the call with mean and rstd, and the launches that compute them before the backward pass.

    If the call has them already, there are no launches.
    """
    if call.rstd is not None:
        return call, []
    count = prod(call.x.shape[:-1])
    rstd = new_workspace(call.x, count)
    mean = None if call.options.is_rms else new_workspace(call.x, count)
    config: AnyForwardConfig
    if call.is_channels_first:
        config = channels_first.choose_statistics(call.rows)
    else:
        can_wait, has_residual = call.x.device.has_launch_options, call.residual is not None
        config = choose_statistics(call.cols, call.itemsize, call.multiprocessors, has_residual, can_wait)
    statistics = LayerNormForwardCall(
        x=call.x,
        residual=call.residual,
        gate=call.gate,
        options=call.options.statistics_options,
        out=RowStatistics(mean, rstd),
    )
    return replace(call, mean=mean, rstd=rstd), plan_forward(statistics, config)
