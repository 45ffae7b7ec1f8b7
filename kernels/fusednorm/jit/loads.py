"""Loads: masks of columns, values as float32, x plus what is added to it, parameters as they are used."""

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
def column_mask(col, cols, EVEN: tl.constexpr):
    """Which columns exist; a constant, which the compiler folds away, where every block is full."""
    if EVEN:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def unaligned_zero(cols, NARROW: tl.constexpr):
    """0; where accesses are NARROW, one of which the compiler does not know that it is aligned.

    Were it to know that parameters are, each thread would hold the neighbours that one wide access of theirs
    brings, and the narrow accesses of x would leave gaps between lanes.
    """
    if NARROW:
        return cols >> 30
    else:
        return 0


@triton.jit
def widened(value, FAST: tl.constexpr):
    """float32 of a tile.

    bfloat16 takes one instruction an element here, where the compiler's own conversion takes three for two, at
    half the rate.  Being opaque, conversions also stay where they are written: what is used twice, or by every turn
    of a loop, is held in 16 bits and not in twice as many registers of converted values.
    """
    if FAST and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [value],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    elif FAST and value.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=r,=r,r",
            [value],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    else:
        return value.to(tl.float32)


@triton.jit
def offset_weight(weight, WEIGHT_OFFSET: tl.constexpr):
    """weight + WEIGHT_OFFSET, what x_hat is multiplied by; without an offset, weight itself."""
    if WEIGHT_OFFSET == 0.0:
        return weight
    else:
        return weight + WEIGHT_OFFSET


@triton.jit
def load_rows(x_ptr, residual_ptr, x_at, residual_at, mask, EVICT: tl.constexpr, FAST: tl.constexpr):
    """x, or x + residual, in float32; masked lanes are 0."""
    h = widened(tl.load(x_ptr + x_at, mask=mask, other=0.0, eviction_policy=EVICT), FAST)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0, eviction_policy=EVICT)
        h += widened(residual, FAST)
    return h


@triton.jit
def chunk_of(chunks, residuals, i: tl.constexpr, FAST: tl.constexpr):
    """Chunk i of h in float32."""
    h = widened(chunks[i], FAST)
    if len(residuals) > 0:
        h += widened(residuals[i], FAST)
    return h
