"""Runs of channels in the registers of the backward kernels for contiguous groups.

In a tile of `group_norm.gradient_tiles` UNITS adjacent lanes belong to one channel, the next ones to the next.
"""

import triton
import triton.language as tl

from fusednorm.jit.prefetch import prefetch


@triton.jit
def compute_run_positions(LANES: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr):
    """Compute each element's index among those positions of its channel that the tile covers, [LANES, GROUP].

    A tile has UNITS lanes for each channel, and a lane has GROUP elements.
    """
    return (tl.arange(0, LANES) % UNITS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def prefetch_channel_runs(ptr, channel_size, channels_left, left, RUN: tl.constexpr, CHANNELS: tl.constexpr):
    """Prefetch up to RUN positions of each of up to CHANNELS channels into L2.

    Only `left` positions and `channels_left` channels exist from ptr on.  `channel_size` is the number of
    positions of a channel.
    """
    count = tl.minimum(left, RUN)
    if CHANNELS == 1:
        if count > 0:
            prefetch(ptr, count)
    else:
        there = tl.minimum(channels_left, CHANNELS)
        if channel_size <= RUN:
            prefetch(ptr, there * channel_size)
        elif count > 0:
            for channel in range(0, there):
                prefetch(ptr + channel * channel_size, count)
