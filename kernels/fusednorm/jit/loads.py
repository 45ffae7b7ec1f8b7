"""Loads: masks of columns, conversion to float32, the sum of x and residual, and the offset of the weight."""

import triton
import triton.language as tl


@triton.jit
def load_masked(ptr, at, mask, EVICT: tl.constexpr):
    """Load a tile from ptr + `at` in float32; masked elements are 0."""
    return tl.load(ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def load_residual_sum(x_ptr, residual_ptr, at, mask, EVICT: tl.constexpr):
    """Load x + residual in float32, both at the offsets `at`.  Masked elements are 0.

    The sum is x alone if residual_ptr is None.
    """
    h = load_masked(x_ptr, at, mask, EVICT)
    if residual_ptr is not None:
        h += load_masked(residual_ptr, at, mask, EVICT)
    return h


@triton.jit
def make_column_mask(col, cols, EVEN: tl.constexpr):
    """Make the mask of columns that exist.  If every block is full (EVEN), it is a constant.

    The compiler removes the constant.
    """
    if EVEN:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def make_unaligned_zero(cols, NARROW: tl.constexpr):
    """Make an offset of 0.  If accesses are NARROW, it hides the alignment of addresses from the compiler.

    If the compiler knew that parameters are aligned, it would load them with wide accesses, each thread
    would hold neighbouring elements, and the narrow accesses of x would leave gaps between lanes.
    """
    if NARROW:
        return cols >> 30
    else:
        return 0


@triton.jit
def widen(value):
    """Convert a tile to float32.

    For bfloat16 this takes one instruction per element; the compiler's own conversion takes three instructions per
    two elements, at half the rate.  The compiler cannot move these opaque conversions, so values that are used
    twice, or in every iteration of a loop, stay in 16 bits instead of twice as many registers of converted values.
    """
    if value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [value],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    elif value.dtype == tl.float16:
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
def add_weight_offset(weight, WEIGHT_OFFSET: tl.constexpr):
    """Compute weight + WEIGHT_OFFSET, the factor of x_hat.  If the offset is 0, return weight unchanged."""
    if WEIGHT_OFFSET == 0.0:
        return weight
    else:
        return weight + WEIGHT_OFFSET


@triton.jit
def add_one(scale):
    """Compute the factor of adaptive norms, 1 + scale, in float32."""
    return 1.0 + scale.to(tl.float32)


@triton.jit
def load_gate(gate_ptr, at, mask):
    """Load a tile of a sample's gate in the dtype of memory, as a tuple of one; () if gate_ptr is None."""
    gates = ()
    if gate_ptr is not None:
        gates = (tl.load(gate_ptr + at, mask=mask, other=0.0),)
    return gates


@triton.jit
def add_residual(x, residual, gates):
    """Compute h = residual + gate * x in float32, rounded once; `gates` is a tuple of the gate, or () for 1."""
    h = widen(x)
    if len(gates) > 0:
        h = tl.fma(widen(gates[0]), h, widen(residual))
    else:
        h += widen(residual)
    return h


@triton.jit
def load_row_residual_sum(x_ptr, residual_ptr, gates, x_at, residual_at, mask, EVICT: tl.constexpr):
    """Load x, and h = residual + gate * x in float32, at the offsets `x_at` and `residual_at`.

    Masked elements are 0.  x has the dtype of memory; h is x alone if residual_ptr is None.  `gates` is a tuple of
    the gate, or () for 1.
    """
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0, eviction_policy=EVICT)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0, eviction_policy=EVICT)
        h = add_residual(x, residual, gates)
    else:
        h = widen(x)
    return x, h


@triton.jit
def add_residual_chunk(chunks, residuals, i: tl.constexpr):
    """Compute chunk i of h = x + residual in float32; h is x if `residuals` is empty.

    `chunks` and `residuals` are tuples of loaded tiles of x and of the residual, in the dtype of memory.
    """
    h = widen(chunks[i])
    if len(residuals) > 0:
        h += widen(residuals[i])
    return h
