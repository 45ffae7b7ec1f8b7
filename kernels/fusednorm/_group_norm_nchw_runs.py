"""Runs of channels, as the backward kernels hold them where each group is contiguous.

A tile is [LANES, GROUP], a lane for each thread and GROUP elements what it loads at once.  UNITS lanes side by side
are of one channel, the next ones of the next channel.  A piece is CHUNKS tiles behind one another along the channels,
held as they lie in memory: 16-bit values take half the registers.
"""

import triton
import triton.language as tl

from fusednorm._group_norm_gradients import gained_gradient
from fusednorm._row_moments import widened
from fusednorm._row_pieces import chunk_of


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
    ptr, at, position, left, channel_mask, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A piece from ptr on, a tuple of CHUNKS tiles STEP positions apart; empty where ptr is None.

    `at` is where a tile's elements lie; `left` the positions of each channel from ptr on.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = run_mask(position + i * STEP, left, channel_mask, wanted, EVEN)
            tiles = tiles + (tl.load(ptr + i * STEP + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_gradient_runs(
    dy_ptr, x_ptr, residual_ptr, start, at, position, left, channel_mask, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`load_runs` of dy, x and residual from their elements `start` on."""
    dys = load_runs(dy_ptr + start, at, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT)
    xs = load_runs(x_ptr + start, at, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT)
    residuals = ()
    if residual_ptr is not None:
        residuals = load_runs(residual_ptr + start, at, position, left, channel_mask, wanted, EVEN, STEP, CHUNKS, EVICT)
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
    centred, dz, dx_ptr, dresidual_out_ptr, start, at, position, left, channel_mask,
    scale, constant, factor, EVEN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """dx = scale * dz - (constant + factor * centred), and what reached h from elsewhere, of a tile."""
    mask = run_mask(position, left, channel_mask, True, EVEN)
    dx = dz * scale - (centred * factor + constant)
    if dresidual_out_ptr is not None:
        dx += tl.load(dresidual_out_ptr + start + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
