"""Runs of channels in the registers of the backward kernels for contiguous groups.

In a tile of `group_norm.gradient_tiles` UNITS adjacent lanes belong to one channel, the next ones to the next.
"""

import triton
import triton.language as tl

from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import sum_pair


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


@triton.jit
def store_channel_sums(
    dz_part_ptr, dz_xhat_part_ptr, slot, sum_dz, sum_dz_centred, rstd, channels_left,
    CHANNELS: tl.constexpr, UNITS: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Add up lanes' sums of dz and of dz * (x - mean), [CHANNELS * UNITS, 1], over each channel, and store them.

    The sums of dz and of dz * x_hat of the first `channels_left` channels are stored from `slot` on.
    """
    run_dz, run_dz_centred = sum_pair(
        tl.reshape(sum_dz, (CHANNELS, UNITS)), tl.reshape(sum_dz_centred, (CHANNELS, UNITS)), 1
    )
    run = tl.arange(0, CHANNELS)[:, None]
    run_mask = run < channels_left
    tl.store(dz_part_ptr + slot + run, run_dz * (1.0 / GAIN), mask=run_mask)
    tl.store(dz_xhat_part_ptr + slot + run, run_dz_centred * (rstd * (1.0 / GAIN)), mask=run_mask)
