"""The choice of a configuration for a pass over the channels of contiguous samples.

The choice depends on the number of channels and the size of an element, on the number of positions only by the
width of an access and the size of a tile, and not on the number of samples.
"""

from dataclasses import replace
from typing import TypeVar

from fusednorm.integers import compute_vector_width, next_power_of_2
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

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


def choose_statistics(positions: int) -> ChannelsFirstForwardSweep:
    """Choose the configuration of a pass that computes only mean and rstd."""
    return _limit_positions(tables.FORWARD_SWEEP, positions)


def _classify_access(positions: int, itemsize: int) -> int:
    """Return the most bytes that a thread reads at once, in the classes of the tables."""
    return max(tables.NARROWEST, itemsize * compute_vector_width(16 // itemsize, positions))


def _find_entry(channels: int, table: tuple[tuple[int, Config], ...]) -> Config | None:
    return next((config for limit, config in table if channels <= limit), None)


def _limit_positions(config: Config, positions: int) -> Config:
    """Return a configuration whose tiles have no more positions than the next power of two of a sample's."""
    block_p = min(config.block_p, next_power_of_2(positions))
    return config if block_p == config.block_p else replace(config, block_p=block_p)
