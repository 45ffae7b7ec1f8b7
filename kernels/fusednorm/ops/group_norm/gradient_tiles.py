"""Code of GroupNorm's backward kernels: dz from dy, and the affine step of a channel in its sample.

z = x_hat * slope + offset with slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift, where each of
the four is optional, and dz = dy * act'(z), including dropout's factor.  For 16-bit results silu and gelu_tanh use
the hardware's tanh of z / 2, and 2 * dz costs one instruction less than dz.  Kernels therefore use GAIN * dz and
slopes and offsets divided by GAIN, which is 1 or 2; each sum of GAIN * dz is divided by GAIN once, at its end.

Kernels read dy, x and residual in fragments.  A tile is [LANES, GROUP]: one lane per thread, which loads GROUP
adjacent elements at once.  A fragment is CHUNKS consecutive tiles along the positions, held in the dtype of memory:
16-bit values need half the registers.  `place` is the position, in the first tile, of each element or of each lane;
`others` is the mask of elements whose channel exists.
"""

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_tanh
from fusednorm.jit.epilogue import compute_keep_mask, differentiate_activation
from fusednorm.jit.loads import add_residual_chunk, widen
from fusednorm.jit.reductions import multiply_for_uniform_sum
from fusednorm.ops.group_norm.affine_step import load_slope_and_offset

_TANH_SLOPE = tl.constexpr(2.0 * 0.7978845608028654)
_TANH_CUBIC = tl.constexpr(8.0 * 0.7978845608028654 * 0.044715)


@triton.jit
def load_scaled_slope_and_offset(parameters, channel, sample_channel, mask, GAIN: tl.constexpr):
    """Load slope and offset by `load_slope_and_offset`, and divide them by GAIN."""
    slope, offset = load_slope_and_offset(parameters, channel, sample_channel, mask)
    return slope * (1.0 / GAIN), offset * (1.0 / GAIN)


@triton.jit
def backpropagate_scaled_epilogue(
    dy,
    argument,
    slope,
    offset,
    sample,
    position,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
):
    """Compute GAIN * dz of a tile from dy, back through dropout and the activation.

    Here, dz is the gradient of z, the affine step's output. z / GAIN is argument * slope + offset; `sample`
    and `position` are the row and the position for dropout's mask.
    """
    if DROPOUT:
        keep = compute_keep_mask(seed, sample, position, dropout_threshold)
        dy = tl.where(keep, dy * dropout_scale, 0.0)
    if ACTIVATION == "none":
        return dy
    elif GAIN == 1.0:
        derivative = differentiate_activation(argument * slope + offset, negative_slope, ACTIVATION)
        return multiply_for_uniform_sum(dy, derivative)
    else:
        half = argument * slope + offset
        if ACTIVATION == "silu":
            t = approximate_tanh(half)
            rise = half
        else:
            tl.static_assert(ACTIVATION == "gelu_tanh", "no derivative with a gain of 2 for an activation")
            square = half * half
            t = approximate_tanh(half * (square * _TANH_CUBIC + _TANH_SLOPE))
            rise = half * (square * (3.0 * _TANH_CUBIC) + _TANH_SLOPE)
        # act(z) = half + half * tanh(...), so 2 act'(z) = 1 + t + rise * (1 - t^2).
        return dy + dy * (t + rise * (1.0 - t * t))


@triton.jit
def make_tile_mask(position, left, channel_mask, enabled, EVEN: tl.constexpr):
    """Make the mask of the elements of a tile that are read or written.

    If EVEN these are all, else those with `channel_mask` and with `position` below `left`; none unless
    `enabled`.
    """
    mask = tl.full(position.shape, True, tl.int1) & enabled
    if not EVEN:
        # The order of the operands changes the compiled code; each layout keeps the order of its measurements.
        if position.shape[1] == 1:
            mask = mask & (position < left) & channel_mask
        else:
            mask = mask & channel_mask & (position < left)
    return mask


@triton.jit
def load_tiles(
    ptr, start, at, step, position, left, channel_mask, enabled,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS consecutive tiles [LANES, GROUP] in the dtype of memory, as a tuple; () if ptr is None.

    Together the tiles are a fragment; each is STEP positions after the one before.  The elements of the
    first tile are at ptr + `start` + `at`, those of each further tile `step` elements later.  `position` is
    the position of the first tile's elements in the fragment; `left` positions exist from the first tile on.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = make_tile_mask(position + i * STEP, left, channel_mask, enabled, EVEN)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_backward_tiles(
    dy_ptr, x_ptr, residual_ptr, start, at, step, position, left, channel_mask, enabled,
    EVEN: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load the tiles of dy, x and residual at the same offsets by `load_tiles`, and return the three.

    Each is a tuple of tiles in the dtype of memory; the residual's is empty if residual_ptr is None.
    """
    dys = load_tiles(dy_ptr, start, at, step, position, left, channel_mask, enabled, EVEN, STEP, CHUNKS, EVICT)
    xs = load_tiles(x_ptr, start, at, step, position, left, channel_mask, enabled, EVEN, STEP, CHUNKS, EVICT)
    residuals = load_tiles(
        residual_ptr, start, at, step, position, left, channel_mask, enabled, EVEN, STEP, CHUNKS, EVICT
    )
    return dys, xs, residuals


@triton.jit
def compute_tile_centred_and_dz(
    fragment, i: tl.constexpr, position, left, channel_mask,
    mean, slope, offset, sample, sample_position, seed, dropout_threshold, dropout_scale, negative_slope,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute h - mean and GAIN * dz of tile i of a fragment, [LANES, GROUP] each.

    Here, dz is the gradient of z, the affine step's output: z is GAIN * ((h - mean) * slope + offset).
    `fragment` is the result of `load_backward_tiles`; `position` and `sample_position` are the positions of
    the tile's elements in the fragment and in the sample.
    """
    centred = add_residual_chunk(fragment[1], fragment[2], i) - mean
    if not EVEN:
        # z of an element that does not exist may be infinite, and 0 * inf = NaN would spoil a sum.
        centred = tl.where(make_tile_mask(position, left, channel_mask, True, False), centred, 0.0)
    dz = backpropagate_scaled_epilogue(
        widen(fragment[0][i]), centred, slope, offset, sample, sample_position,
        seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
    return centred, dz


@triton.jit
def store_tile_gradient(centred, dz, dx_ptr, dresidual_out, at, mask, scale, constant, factor, EVICT: tl.constexpr):
    """Compute and store dx of a tile: scale * dz - (constant + factor * centred) + dresidual_out.

    `centred` is h - mean.  `dresidual_out` is a tuple of one tile, or an empty tuple.
    """
    dx = dz * scale - (centred * factor + constant)
    if len(dresidual_out) > 0:
        dx += widen(dresidual_out[0])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
