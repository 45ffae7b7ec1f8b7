"""Operations that are fused after the affine step: activations with their derivatives, and dropout.

The kernels call these jit functions; `reference` has the same functions in plain torch.  In every product of a
tensor and a constexpr the tensor stands on the left: in the other order the interpreter makes the product a
constexpr.  `fusednorm.arguments.dropout` defines the dropout mask.
"""

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_exp2, approximate_reciprocal, approximate_tanh

PHILOX_ROUNDS = tl.constexpr(7)
"""The number of Philox rounds, equal to that of `fusednorm.arguments.dropout`."""

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def sigmoid(z):
    """Compute 1 / (1 + exp(-z))."""
    return approximate_reciprocal(1.0 + approximate_exp2(z * -_LOG2E))


@triton.jit
def _compute_sigmoid_pair(z):
    """Compute sigmoid(z) and 1 - sigmoid(z); the second has no cancellation where the first is near 1."""
    # Below -87 the exponential would be infinite, and its product with the reciprocal NaN.
    e = approximate_exp2(tl.minimum(z * -_LOG2E, 126.0, propagate_nan=tl.PropagateNan.ALL))
    s = approximate_reciprocal(1.0 + e)
    return s, e * s


@triton.jit
def activate(z, negative_slope, ACTIVATION: tl.constexpr):
    """Apply the activation to a float32 tile of any shape; ACTIVATION "none" returns z.

    `negative_slope` is leaky_relu's, float32.
    """
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, z, z * negative_slope)
    elif ACTIVATION == "silu":
        return z * sigmoid(z)
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # sigmoid(2 u), with the factors of u and of the exponent's base in two constants.
        slope = z * z * (-2.0 * _SQRT_2_OVER_PI * _GELU_CUBIC * _LOG2E) + (-2.0 * _SQRT_2_OVER_PI * _LOG2E)
        return z * approximate_reciprocal(1.0 + approximate_exp2(z * slope))
    else:
        tl.static_assert(ACTIVATION == "none", "activate lacks an activation")
        return z


@triton.jit
def activate_for_dtype(z, negative_slope, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Apply the activation to a float32 tile, as exactly as a result in DTYPE needs.

    For 16-bit results silu and gelu_tanh use the hardware's tanh.  Their error stays below |z| * 2^-12: less
    than half a rounding step of the largest results, but possibly a large part of small results, where z is
    far below 0.
    """
    if ACTIVATION == "silu" and DTYPE.primitive_bitwidth == 16:
        half = z * 0.5
        return half * approximate_tanh(half) + half
    elif ACTIVATION == "gelu_tanh" and DTYPE.primitive_bitwidth == 16:
        half = z * 0.5
        return half * approximate_tanh((z + z * z * z * _GELU_CUBIC) * _SQRT_2_OVER_PI) + half
    else:
        return activate(z, negative_slope, ACTIVATION)


@triton.jit
def differentiate_activation(z, negative_slope, ACTIVATION: tl.constexpr):
    """Compute the activation's derivative at z, in float32, elementwise."""
    if ACTIVATION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, 1.0, negative_slope)
    elif ACTIVATION == "silu":
        s, rest = _compute_sigmoid_pair(z)
        return s + z * (s * rest)
    elif ACTIVATION == "gelu":
        density = approximate_exp2(z * z * (-0.5 * _LOG2E)) * _INV_SQRT_2PI
        return 0.5 * (1.0 + tl.erf(z * _SQRT_HALF)) + z * density
    elif ACTIVATION == "gelu_tanh":
        s, rest = _compute_sigmoid_pair((z + z * z * z * _GELU_CUBIC) * (2.0 * _SQRT_2_OVER_PI))
        slope = (1.0 + z * z * (3.0 * _GELU_CUBIC)) * (2.0 * _SQRT_2_OVER_PI)
        return s + z * (s * rest) * slope
    else:
        tl.static_assert(ACTIVATION == "none", "differentiate_activation lacks an activation")
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _compute_random_words(seed, row, quad):
    """Compute four random uint32 words with the Philox generator for each group of four positions of a row.

    Returns four tiles of `quad`'s shape.  `quad` is the index of a group of four positions in its row;
    `row`, int64, is broadcast to `quad`'s shape.  `seed` is an int64, or a pointer to one, as calls from JAX have.
    """
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    row = row + tl.zeros(quad.shape, tl.int64)
    c0 = quad.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = (row >> 32).to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, tl.zeros(quad.shape, tl.uint32), PHILOX_ROUNDS)


@triton.jit
def compute_keep_mask(seed, row, position, threshold):
    """Compute the mask of the elements that dropout keeps, for a tile of any shape.

    `row` (int64) and `position` (int64 or int32) are each element's row, and its index in the row; an
    element is kept if its random word is at least `threshold`.
    """
    w0, w1, w2, w3 = _compute_random_words(seed, row, position // 4)
    lane = position % 4
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word >= threshold.to(tl.uint32)


@triton.jit
def compute_tile_keep_mask(seed, row, first_quad, threshold, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Compute dropout's mask of kept elements for a [ROWS, COLS] tile of adjacent columns.

    The mask is that of `compute_keep_mask`, with one Philox call for four elements.  The tile starts at column 4 *
    first_quad; `row` is [ROWS, 1] int64; COLS is a multiple of 4.
    """
    quad = first_quad + tl.arange(0, COLS // 4)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    w0, w1, w2, w3 = _compute_random_words(seed, row, quad)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLS))
    return words >= threshold.to(tl.uint32)


@triton.jit
def compute_transposed_keep_mask(seed, row, first_quad, threshold, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Compute dropout's mask of kept elements for a tile [COLS, ROWS], whose first axis is the columns.

    The mask is that of `compute_tile_keep_mask` with its axes exchanged; `row` is [1, ROWS] int64.
    """
    quad = first_quad + tl.arange(0, COLS // 4)[:, None] + tl.zeros((1, ROWS), tl.int32)
    w0, w1, w2, w3 = _compute_random_words(seed, row, quad)
    words = tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (0, 2, 3, 1))
    return tl.reshape(words, (COLS, ROWS)) >= threshold.to(tl.uint32)


@triton.jit
def apply_epilogue(
    y,
    row,
    first_col,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Apply the activation and dropout to a [ROWS, COLS] tile.

    `row` is [ROWS, 1] int64; `first_col` is the tile's first column, a multiple of 4 if there is dropout.
    """
    y = activate(y, negative_slope, ACTIVATION)
    if DROPOUT:
        keep = compute_tile_keep_mask(seed, row, first_col // 4, dropout_threshold, y.shape[0], y.shape[1])
        y = tl.where(keep, y * dropout_scale, 0.0)
    return y
