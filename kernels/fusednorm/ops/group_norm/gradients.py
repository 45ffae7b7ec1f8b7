"""From dy back to dz, and the affine step of a channel in its sample: what GroupNorm's backward kernels share.

z = x_hat * slope + offset with slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift, each of the
four present or not, and dz = dy * act'(z), dropout's factor included.  For 16-bit results silu and gelu_tanh take
the hardware's tanh of z / 2, and 2 dz costs an instruction less than dz: kernels work with GAIN * dz and with
slopes and offsets over GAIN, where GAIN is 1 or 2; sums of GAIN * dz are put right once, at their end.

What is read of dy, x and residual comes in pieces.  A tile is [LANES, GROUP], a lane for each thread and GROUP
neighbouring elements what it loads at once.  A piece is CHUNKS tiles behind one another along the positions, held
as they lie in memory: 16-bit values take half the registers.  `place` is where in the first tile each element is,
or each lane, by position; `others` says which exist otherwise: those of channels that there are.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activation_derivative, dropout_keep, tanh
from fusednorm.jit.loads import chunk_of, widened
from fusednorm.ops.group_norm.affine import load_masked_affine

_TANH_SLOPE = tl.constexpr(2.0 * 0.7978845608028654)
_TANH_CUBIC = tl.constexpr(8.0 * 0.7978845608028654 * 0.044715)


@triton.jit
def load_gained_affine(parameters, channel, sample_channel, mask, GAIN: tl.constexpr):
    """`load_masked_affine`, slope and offset over GAIN."""
    slope, offset = load_masked_affine(parameters, channel, sample_channel, mask)
    return slope * (1.0 / GAIN), offset * (1.0 / GAIN)


@triton.jit
def gained_gradient(
    dy,
    argument,
    slope,
    offset,
    sample,
    position,
    seed,
    dropout_threshold,
    dropout_scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
):
    """GAIN * dz of a tile, with z / GAIN = argument * slope + offset."""
    if DROPOUT:
        keep = dropout_keep(seed, sample, position, dropout_threshold)
        dy = tl.where(keep, dy * dropout_scale, 0.0)
    if ACTIVATION == "none":
        return dy
    elif GAIN == 1.0:
        return dy * activation_derivative(argument * slope + offset, ACTIVATION, FAST)
    else:
        half = argument * slope + offset
        if ACTIVATION == "silu":
            t = tanh(half, FAST)
            rise = half
        else:
            square = half * half
            t = tanh(half * (square * _TANH_CUBIC + _TANH_SLOPE), FAST)
            rise = half * (square * (3.0 * _TANH_CUBIC) + _TANH_SLOPE)
        # act(z) = half + half * tanh(...), so 2 act'(z) = 1 + t + rise * (1 - t^2).
        return dy + dy * (t + rise * (1.0 - t * t))


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
