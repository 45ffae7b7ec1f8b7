"""Runs of channels, as the backward kernels hold them where each group is contiguous.

A tile is [LANES, GROUP], a lane for each thread and GROUP elements what it loads at once.  UNITS lanes side by side
are of one channel, the next ones of the next channel.  A piece is CHUNKS tiles behind one another along the
channels, held as they lie in memory: 16-bit values take half the registers.
"""

import triton
import triton.language as tl

from fusednorm.jit.moments import widened
from fusednorm.jit.pieces import chunk_of
from fusednorm.jit.prefetch import prefetch
from fusednorm.ops.group_norm.gradients import gained_gradient


@triton.jit
def run_position(LANES: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr):
    """Where in a tile's run of its channel each element is, [LANES, GROUP]."""
    return (tl.arange(0, LANES) % UNITS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def run_mask(position, left, channel_mask, wanted, EVEN: tl.constexpr):
    """Which elements exist: of wanted pieces, all where EVEN, else those below `left` of the channels there are."""
    mask = tl.full(position.shape, True, tl.int1) & wanted
    if not EVEN:
        mask = mask & channel_mask & (position < left)
    return mask


@triton.jit
def load_runs(
    ptr, start, at, step, position, left, channel_mask, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A piece, a tuple of CHUNKS tiles STEP positions apart; empty where ptr is None.

    Its first tile's elements lie `start` + `at` from ptr on, the next one's `step` further; `left` is how many
    positions each channel has from the first tile on.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = run_mask(position + i * STEP, left, channel_mask, wanted, EVEN)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_gradient_runs(
    dy_ptr, x_ptr, residual_ptr, start, at, position, left, channel_mask, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`load_runs` of dy, x and residual, which lie alike."""
    dys = load_runs(dy_ptr, start, at, STEP, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT)
    xs = load_runs(x_ptr, start, at, STEP, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT)
    residuals = load_runs(
        residual_ptr, start, at, STEP, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT
    )
    return dys, xs, residuals


@triton.jit
def run_gradient(
    piece, i: tl.constexpr, position, left, channel_mask,
    mean, slope, offset, sample, sample_position, seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, STEP: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """h - mean and GAIN * dz of tile i of a piece, z being (h - mean) * slope + offset times GAIN.

    `sample_position` is where in the sample the elements of the piece's first tile are.
    """
    centred = chunk_of(piece[1], piece[2], i, FAST) - mean
    if not EVEN:
        # z of what is not there may be infinite, and 0 * inf would spoil a sum.
        centred = tl.where(run_mask(position + i * STEP, left, channel_mask, True, False), centred, 0.0)
    dz = gained_gradient(
        widened(piece[0][i], FAST), centred, slope, offset, sample, sample_position + i * STEP,
        seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN, FAST,
    )  # fmt: skip
    return centred, dz


@triton.jit
def write_run(
    centred, dz, dx_ptr, outside, at, mask, scale, constant, factor, FAST: tl.constexpr, EVICT: tl.constexpr
):
    """dx = scale * dz - (constant + factor * centred) + outside, which is a tuple of one tile or of none."""
    dx = dz * scale - (centred * factor + constant)
    if len(outside) > 0:
        dx += widened(outside[0], FAST)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


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
