"""Loading GroupNorm's tiles and parameters: what no layout changes."""

import triton
import triton.language as tl


@triton.jit
def load_masked(ptr, at, mask, EVICT: tl.constexpr):
    """A tile in float32; masked elements are 0."""
    return tl.load(ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def load_sum(x_ptr, residual_ptr, at, residual_at, mask, EVICT: tl.constexpr):
    """x, or x + residual, in float32; masked elements are 0."""
    h = load_masked(x_ptr, at, mask, EVICT)
    if residual_ptr is not None:
        h += load_masked(residual_ptr, residual_at, mask, EVICT)
    return h


@triton.jit
def load_weight(weight_ptr, channel, mask):
    """weight of each channel in float32; ones, which the compiler drops from a product, where there is none."""
    if weight_ptr is None:
        return tl.full(channel.shape, 1.0, tl.float32)
    else:
        return tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_bias(bias_ptr, channel, mask):
    """bias of each channel in float32; zeros, which cost a product nothing once fused, where there is none."""
    if bias_ptr is None:
        return tl.zeros(channel.shape, tl.float32)
    else:
        return tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
