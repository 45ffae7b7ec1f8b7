"""Runs of channels, as the backward kernels hold them where each group is contiguous.

In a tile of `group_norm.gradients` UNITS lanes side by side are of one channel, the next ones of the next channel.
"""

import triton
import triton.language as tl

from fusednorm.jit.prefetch import prefetch


@triton.jit
def run_position(LANES: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr):
    """Where in a tile's run of its channel each element is, [LANES, GROUP]."""
    return (tl.arange(0, LANES) % UNITS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def prefetch_runs(ptr, channel_size, channels_left, left, RUN: tl.constexpr, CHANNELS: tl.constexpr):
    """Ask for RUN positions, or `left` if fewer, of each channel of a piece."""
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
