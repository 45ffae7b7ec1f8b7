"""Code of LayerNorm's and RMSNorm's backward kernels: parameters, and the gradients of the affine step and of h."""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import compute_tile_keep_mask, differentiate_activation
from fusednorm.jit.loads import add_one, add_weight_offset, widen


@triton.jit
def load_unconverted_parameter(ptr, col, col_mask, DEFAULT: tl.constexpr):
    """Load weight or bias in the dtype of memory.  If ptr is None, return a float32 tile of DEFAULT."""
    if ptr is not None:
        return tl.load(ptr + col, mask=col_mask, other=0.0)
    else:
        return tl.full(col.shape, DEFAULT, tl.float32)


@triton.jit
def load_parameter(ptr, col, col_mask, DEFAULT: tl.constexpr):
    """Load weight or bias as float32; a tile of DEFAULT if ptr is None."""
    return load_unconverted_parameter(ptr, col, col_mask, DEFAULT).to(tl.float32)


@triton.jit
def load_affine_steps(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, own, modulation, col, mask,
    WEIGHT_OFFSET: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Load the factor and the offset of x_hat in the argument of the activation, as float32.

    Without an activation the offset is not needed, and 0.  The head's weight and bias start at `own`, the sample's
    scale and shift at `modulation`.
    """
    factor = add_weight_offset(load_parameter(weight_ptr, own + col, mask, 1.0), WEIGHT_OFFSET)
    if ACTIVATION == "none":
        offset = 0.0
    else:
        offset = load_parameter(bias_ptr, own + col, mask, 0.0)
    if scale_ptr is not None:
        scale = add_one(load_parameter(scale_ptr, modulation + col, mask, 0.0))
        factor = factor * scale
        if ACTIVATION != "none":
            offset = offset * scale
    if ACTIVATION != "none" and shift_ptr is not None:
        offset = offset + load_parameter(shift_ptr, modulation + col, mask, 0.0)
    return factor, offset


@triton.jit
def combine_affine_steps(
    weights, biases, scales, shifts, i: tl.constexpr, col, WEIGHT_OFFSET: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Compute the results of `load_affine_steps` at chunk i of loaded parameters, in the dtype of memory.

    The tuple of a parameter that is None or not needed is empty.
    """
    if len(weights) > 0:
        factor = widen(weights[i])
    else:
        factor = tl.full(col.shape, 1.0, tl.float32)
    factor = add_weight_offset(factor, WEIGHT_OFFSET)
    if ACTIVATION == "none":
        offset = 0.0
    elif len(biases) > 0:
        offset = widen(biases[i])
    else:
        offset = tl.full(col.shape, 0.0, tl.float32)
    if len(scales) > 0:
        scale = add_one(widen(scales[i]))
        factor = factor * scale
        if ACTIVATION != "none":
            offset = offset * scale
    if len(shifts) > 0:
        offset = offset + widen(shifts[i])
    return factor, offset


@triton.jit
def backpropagate_epilogue(
    dy,
    x_hat,
    weight,
    bias,
    row,
    first_col,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute dz from dy, back through dropout and the activation.  Here, dz is the gradient of z, the affine
    step's output.

    The tiles are [ROWS, COLS] from column `first_col` on; `row` is [ROWS, 1] int64.
    """
    dz = dy
    if DROPOUT:
        keep = compute_tile_keep_mask(seed, row, first_col // 4, dropout_threshold, dy.shape[0], dy.shape[1])
        dz = tl.where(keep, dz * dropout_scale, 0.0)
    if ACTIVATION != "none":
        dz = dz * differentiate_activation(x_hat * weight + bias, negative_slope, ACTIVATION)
    return dz


@triton.jit
def store_input_gradients(gradient, gates, dx_ptr, dresidual_ptr, start, col, mask, EVICT: tl.constexpr):
    """Store dx, gate times the gradient of h = residual + gate * x, and this gradient as dresidual.

    Each is cast to its tensor's dtype; dresidual is not stored if dresidual_ptr is None.  `gates` is a tuple of the
    gate, or () for 1.
    """
    dx = gradient
    if len(gates) > 0:
        dx = gradient * widen(gates[0])
    tl.store(dx_ptr + start + col, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
    if dresidual_ptr is not None:
        tl.store(
            dresidual_ptr + start + col,
            gradient.to(dresidual_ptr.dtype.element_ty),
            mask=mask,
            eviction_policy=EVICT,
        )
