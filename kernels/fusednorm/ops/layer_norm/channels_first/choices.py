"""Planning of a pass over the channels of contiguous samples: the choice of a configuration, and its launches.

The choice depends on the number of channels and the size of an element, on the number of positions only by the
width of an access and the size of a tile, and not on the number of samples.
"""

from dataclasses import replace
from typing import TypeVar

from fusednorm.arguments.arrays import new_workspace
from fusednorm.errors import UnsupportedShapeError
from fusednorm.integers import compute_vector_width, next_power_of_2
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall, RowStatistics
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit, plan_split_backward
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile, plan_tile_backward
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep, plan_sweep_forward
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile, plan_tile_forward

ChannelsFirstForwardConfig = ChannelsFirstForwardTile | ChannelsFirstForwardSweep
ChannelsFirstBackwardConfig = ChannelsFirstBackwardTile | ChannelsFirstBackwardSplit
Config = TypeVar(
    "Config",
    ChannelsFirstForwardTile,
    ChannelsFirstForwardSweep,
    ChannelsFirstBackwardTile,
    ChannelsFirstBackwardSplit,
)


def choose_forward(
    channels: int, positions: int, itemsize: int, has_residual: bool = False
) -> ChannelsFirstForwardConfig:
    """Choose the forward configuration for samples [channels, positions] of elements of `itemsize` bytes.

    A residual takes as many registers as x: half as many channels fit a program, and half as many programs a
    multiprocessor.
    """
    table = tables.FORWARD[itemsize, _classify_access(positions, itemsize)]
    found = _find_entry(channels, table)
    if found is None or (has_residual and 2 * channels > table[-1][0]):
        return _limit_positions(tables.FORWARD_SWEEP, positions)
    if has_residual:
        found = replace(found, programs_per_sm=max(1, found.programs_per_sm // 2))
    return _limit_positions(found, positions)


def choose_backward(
    channels: int, positions: int, itemsize: int, has_residual: bool = False
) -> ChannelsFirstBackwardConfig:
    """Choose the backward configuration for samples [channels, positions] of elements of `itemsize` bytes."""
    table = tables.BACKWARD[itemsize, _classify_access(positions, itemsize)]
    found = _find_entry(channels, table)
    if found is None or (has_residual and 2 * channels > table[-1][0]):
        return _limit_positions(tables.BACKWARD_SPLIT, positions)
    return _limit_positions(found, positions)


def plan_forward(call: LayerNormForwardCall, config: ChannelsFirstForwardConfig | None = None) -> list[Launch]:
    """Plan the launch of a forward pass; `config` overrides the choice, for tests, benchmarks and compile checks.

    Raises:
        UnsupportedShapeError: y is float8.
    """
    if call.y_scale is not None:
        raise UnsupportedShapeError(
            "a float8 y needs channels that are adjacent in memory: convert x to torch.channels_last"
        )
    positions, _, channels = call.x.shape
    config = config or choose_forward(channels, positions, call.itemsize, call.residual is not None)
    match config:
        case ChannelsFirstForwardTile():
            return plan_tile_forward(call, config)
        case ChannelsFirstForwardSweep():
            return plan_sweep_forward(call, config)


def plan_backward(call: LayerNormBackwardCall, config: ChannelsFirstBackwardConfig | None = None) -> list[Launch]:
    """Plan the launches of a backward pass; `config` overrides the choice, as in `plan_forward`."""
    positions, _, channels = call.x.shape
    config = config or choose_backward(channels, positions, call.itemsize, call.residual is not None)
    match config:
        case ChannelsFirstBackwardTile():
            return plan_tile_backward(call, config)
        case ChannelsFirstBackwardSplit():
            call, statistics = _add_statistics(call)
            return statistics + plan_split_backward(call, config)


def _add_statistics(call: LayerNormBackwardCall) -> tuple[LayerNormBackwardCall, list[Launch]]:
    """Return the call with mean and rstd, and the launch that computes them if the call has none."""
    if call.rstd is not None:
        return call, []
    positions, samples, _ = call.x.shape
    rstd = new_workspace(call.x, samples, positions)
    mean = None if call.options.is_rms else new_workspace(call.x, samples, positions)
    statistics = LayerNormForwardCall(
        x=call.x,
        residual=call.residual,
        gate=call.gate,
        options=call.options.statistics_options,
        out=RowStatistics(mean, rstd),
    )
    launches = plan_sweep_forward(statistics, _limit_positions(tables.FORWARD_SWEEP, positions))
    return replace(call, mean=mean, rstd=rstd), launches


def _classify_access(positions: int, itemsize: int) -> int:
    """Return the most bytes that a thread reads at once, in the classes of the tables."""
    return max(tables.NARROWEST, itemsize * compute_vector_width(16 // itemsize, positions))


def _find_entry(channels: int, table: tuple[tuple[int, Config], ...]) -> Config | None:
    return next((config for limit, config in table if channels <= limit), None)


def _limit_positions(config: Config, positions: int) -> Config:
    """Return a configuration whose tiles have no more positions than the next power of two of a sample's."""
    block_p = min(config.block_p, next_power_of_2(positions))
    return config if block_p == config.block_p else replace(config, block_p=block_p)
