"""Loads in float32 of what several algorithms hold that way: one tensor, or x with what is added to it."""

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
