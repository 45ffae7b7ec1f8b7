"""Code of GroupNorm's backward kernels: dz from dy, and the affine step of a channel in its sample.

z = x_hat * slope + offset with slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift, where each of
the four is optional, and dz = dy * act'(z), including dropout's factor.  For 16-bit results silu and gelu_tanh use
the hardware's tanh of z / 2, and 2 * dz costs one instruction less than dz.  Kernels therefore use GAIN * dz and
slopes and offsets divided by GAIN, which is 1 or 2; each sum of GAIN * dz is divided by GAIN once, at its end.

Kernels read dy, x and residual in pieces.  A tile is [LANES, GROUP]: one lane per thread, which loads GROUP
adjacent elements at once.  A piece is CHUNKS consecutive tiles along the positions, held in the dtype of memory:
16-bit values need half the registers.  `place` is the position, in the first tile, of each element or of each lane;
`others` is the mask of elements whose channel exists.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activation_derivative, dropout_keep, tanh
from fusednorm.jit.loads import chunk_of, widened
from fusednorm.jit.reductions import multiply_terms
from fusednorm.ops.group_norm.affine import load_masked_affine

_TANH_SLOPE = tl.constexpr(2.0 * 0.7978845608028654)
_TANH_CUBIC = tl.constexpr(8.0 * 0.7978845608028654 * 0.044715)


@triton.jit
def load_gained_affine(parameters, channel, sample_channel, mask, GAIN: tl.constexpr):
    """Load slope and offset by `load_masked_affine`, divided by GAIN."""
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
):
    """Compute GAIN * dz of a tile, with z / GAIN = argument * slope + offset."""
    if DROPOUT:
        keep = dropout_keep(seed, sample, position, dropout_threshold)
        dy = tl.where(keep, dy * dropout_scale, 0.0)
    if ACTIVATION == "none":
        return dy
    elif GAIN == 1.0:
        return multiply_terms(dy, activation_derivative(argument * slope + offset, ACTIVATION))
    else:
        half = argument * slope + offset
        if ACTIVATION == "silu":
            t = tanh(half)
            rise = half
        else:
            square = half * half
            t = tanh(half * (square * _TANH_CUBIC + _TANH_SLOPE))
            rise = half * (square * (3.0 * _TANH_CUBIC) + _TANH_SLOPE)
        # act(z) = half + half * tanh(...), so 2 act'(z) = 1 + t + rise * (1 - t^2).
        return dy + dy * (t + rise * (1.0 - t * t))


@triton.jit
def tile_mask(place, left, others, wanted, EVEN: tl.constexpr):
    """Compute the mask of a tile's elements.

    It has all wanted elements if EVEN, else only those in `others` with `place` below `left`.
    """
    mask = tl.full(place.shape, True, tl.int1) & wanted
    if not EVEN:
        # The order of the operands changes the compiled code; each layout keeps the order of its measurements.
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
    """Load a piece in the dtype of memory: CHUNKS tiles whose `place` differs by STEP; () if ptr is None.

    The elements of the first tile are at ptr + `start` + `at`, those of the next `step` elements further; `left`
    places exist from the first tile on.
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
    """Load tiles of dy, x and residual by `load_tiles`; all have one layout."""
    dys = load_tiles(dy_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    xs = load_tiles(x_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    residuals = load_tiles(residual_ptr, start, at, step, place, left, others, wanted, EVEN, STEP, CHUNKS, EVICT)
    return dys, xs, residuals


@triton.jit
def tile_gradient(
    piece, i: tl.constexpr, place, left, others,
    mean, slope, offset, sample, sample_position, seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute h - mean and GAIN * dz of tile i of a piece, with z = GAIN * ((h - mean) * slope + offset).

    `place` and `sample_position` are the positions of the tile's elements in the piece and in the sample.
    """
    centred = chunk_of(piece[1], piece[2], i) - mean
    if not EVEN:
        # z of an element that does not exist may be infinite, and 0 * inf = NaN would spoil a sum.
        centred = tl.where(tile_mask(place, left, others, True, False), centred, 0.0)
    dz = gained_gradient(
        widened(piece[0][i]), centred, slope, offset, sample, sample_position,
        seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
    return centred, dz


@triton.jit
def write_tile(centred, dz, dx_ptr, outside, at, mask, scale, constant, factor, EVICT: tl.constexpr):
    """Write dx = scale * dz - (constant + factor * centred) + outside, a tuple of one tile or an empty tuple."""
    dx = dz * scale - (centred * factor + constant)
    if len(outside) > 0:
        dx += widened(outside[0])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
