"""Pieces of x, dy and residual as GroupNorm's backward kernels hold them, and what they make of them.

A tile is [LANES, GROUP], a lane for each thread and GROUP neighbouring elements what it loads at once.  A piece is
CHUNKS tiles behind one another along the positions, held as they lie in memory: 16-bit values take half the
registers.  `place` is where in the first tile each element is, or each lane, by position; `others` says which
exist otherwise: those of channels that there are.
"""

import triton
import triton.language as tl

from fusednorm.jit.moments import widened
from fusednorm.jit.pieces import chunk_of
from fusednorm.ops.group_norm.gradients import gained_gradient


@triton.jit
def tile_mask(place, left, others, wanted, EVEN: tl.constexpr):
    """Which elements of a tile exist: all wanted ones where EVEN, else those of `others` at places below `left`."""
    mask = tl.full(place.shape, True, tl.int1) & wanted
    if not EVEN:
        # The order decides what the compiler makes of it: each layout has the one that it was measured with.
        if place.shape[1] == 1:
            mask = mask & (place < left) & others
        else:
            mask = mask & others & (place < left)
    return mask


@triton.jit
def load_tiles(
    ptr, start, at, step, place, left, others, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A piece, a tuple of CHUNKS tiles STEP places apart, as they lie in memory; empty where ptr is None.

    The first tile's elements lie `start` + `at` from ptr on, the next one's `step` further; `left` places are there
    from the first tile on.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = tile_mask(place + i * STEP, left, others, wanted, EVEN)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_gradient_tiles(
    dy_ptr, x_ptr, residual_ptr, start, at, step, place, left, others, wanted,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`load_tiles` of dy, x and residual, which lie alike."""
    dys = load_tiles(dy_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    xs = load_tiles(x_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    residuals = load_tiles(residual_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    return dys, xs, residuals


@triton.jit
def tile_gradient(
    piece, i: tl.constexpr, place, left, others,
    mean, slope, offset, sample, sample_position, seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h - mean and GAIN * dz of tile i of a piece, z being (h - mean) * slope + offset times GAIN.

    `place` and `sample_position` are the tile's own: where its elements are in the piece and in the sample.
    """
    centred = chunk_of(piece[1], piece[2], i, FAST) - mean
    if not EVEN:
        # z of what is not there may be infinite, and 0 * inf would spoil a sum.
        centred = tl.where(tile_mask(place, left, others, True, False), centred, 0.0)
    dz = gained_gradient(
        widened(piece[0][i], FAST), centred, slope, offset, sample, sample_position,
        seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN, FAST,
    )  # fmt: skip
    return centred, dz


@triton.jit
def write_tile(
    centred, dz, dx_ptr, outside, at, mask, scale, constant, factor, FAST: tl.constexpr, EVICT: tl.constexpr
):
    """dx = scale * dz - (constant + factor * centred) + outside, which is a tuple of one tile or of none."""
    dx = dz * scale - (centred * factor + constant)
    if len(outside) > 0:
        dx += widened(outside[0], FAST)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
