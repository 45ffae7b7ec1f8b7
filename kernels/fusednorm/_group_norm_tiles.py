"""Loading GroupNorm's tiles and taking dy back to dz: what no layout changes."""

import triton
import triton.language as tl

from fusednorm.epilogue import activation_derivative, dropout_keep


@triton.jit
def load_sum(x_ptr, residual_ptr, at, mask, EVICT: tl.constexpr):
    """x, or x + residual, in float32; masked elements are 0."""
    if mask is None:
        h = tl.load(x_ptr + at, eviction_policy=EVICT).to(tl.float32)
        if residual_ptr is not None:
            h += tl.load(residual_ptr + at, eviction_policy=EVICT).to(tl.float32)
    else:
        h = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        if residual_ptr is not None:
            h += tl.load(residual_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return h


@triton.jit
def load_masked(ptr, at, mask, EVICT: tl.constexpr):
    """A tile in float32; masked elements are 0."""
    if mask is None:
        return tl.load(ptr + at, eviction_policy=EVICT).to(tl.float32)
    else:
        return tl.load(ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def output_gradient(
    dy,
    xhat,
    weight,
    bias,
    sample,
    position,
    seed,
    dropout_threshold,
    dropout_scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """dz of one tile; `weight` and `bias` may be None.  Where dy and x_hat are 0 so is dz."""
    dz = dy
    if DROPOUT:
        keep = dropout_keep(seed, sample, position, dropout_threshold)
        dz = tl.where(keep, dz * dropout_scale, 0.0)
    if ACTIVATION != "none":
        z = xhat
        if weight is not None:
            z = z * weight
        if bias is not None:
            z = z + bias
        dz = dz * activation_derivative(z, ACTIVATION, FAST)
    return dz
