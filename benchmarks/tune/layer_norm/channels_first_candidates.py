"""Launch configurations that may suit samples [channels, positions] of contiguous tensors.

Limits on registers are estimates of the compiler's results; they exclude configurations that cannot be fast, not
all slow ones.
"""

from collections.abc import Iterator
from itertools import product

from fusednorm.integers import cdiv, compute_vector_width, next_power_of_2
from fusednorm.launch.launches import REGISTERS_PER_SM
from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.choices import ChannelsFirstBackwardConfig, ChannelsFirstForwardConfig
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

_MOST_CHANNELS = 2048
"""The most channels of a tile; tiles of more have too few positions."""

_REGISTERS_BESIDE = 32
"""The number of a thread's registers besides those for its part of a tile."""

_MOST_THREADS = 2048
"""The most threads of a multiprocessor."""


def iterate_candidates(
    pass_: str, channels: int, positions: int, itemsize: int
) -> Iterator[ChannelsFirstForwardConfig | ChannelsFirstBackwardConfig]:
    """Configurations for samples of `channels` rows of `positions` elements of `itemsize` bytes, each once.

    Args:
        pass_: forward or backward.
    """
    if pass_ == "forward":
        if channels <= _MOST_CHANNELS:
            for block_p, warps, programs in _iterate_tiles(channels, positions, itemsize, 1):
                yield ChannelsFirstForwardTile(block_p, warps, programs)
        for block_p, warps in product((16, 32, 64), (4, 8, 16)):
            yield ChannelsFirstForwardSweep(block_p, warps)
    else:
        if channels <= _MOST_CHANNELS:
            for block_p, warps, programs in _iterate_tiles(channels, positions, itemsize, 2):
                yield ChannelsFirstBackwardTile(block_p, warps, programs)
        for block_p, warps, programs in product((16, 32, 64), (4, 8), (2, 4)):
            yield ChannelsFirstBackwardSplit(block_p, warps, programs)


def _iterate_tiles(channels: int, positions: int, itemsize: int, tensors: int) -> Iterator[tuple[int, int, int]]:
    """(block_p, warps, programs_per_sm) of tiles of all channels of that many tensors.

    The most programs that registers allow, and fewer, down to a third.
    """
    group = compute_vector_width(16 // itemsize, positions)
    for block_p, warps in product((8, 16, 32, 64, 128), (1, 2, 4, 8, 16)):
        if not (group <= block_p <= next_power_of_2(positions)):
            continue
        block_c = max(4, 32 * warps * group // block_p)
        elements = cdiv(channels, block_c) * block_c * block_p // (32 * warps)
        # Narrow accesses take a register for each element.
        held = tensors * elements * max(itemsize, 4 if group == 1 else 0) // 4 + tensors * _REGISTERS_BESIDE
        most = min(REGISTERS_PER_SM // (32 * warps * held), _MOST_THREADS // (32 * warps))
        if elements >= 8 and most:
            for programs in sorted({max(1, most * sixths // 6) for sixths in range(2, 7)}):
                yield block_p, warps, programs
