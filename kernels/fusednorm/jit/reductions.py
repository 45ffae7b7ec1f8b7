"""Reductions that several kernels use, and a rounded product for their terms."""

import triton
import triton.language as tl


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    """Add two pairs, in a reduction."""
    return a0 + a1, b0 + b1


@triton.jit
def sum_pair(a, b, AXIS: tl.constexpr):
    """Sum two tiles of one shape along AXIS in one reduction, keeping the axis.

    Both sums use one tree, with one series of shuffles and one barrier.
    """
    return tl.reduce((a, b), AXIS, _add_pairs, keep_dims=True)


@triton.jit
def sum_pair_to_scalars(a, b):
    """Sum two 1-D tiles of one shape to scalars, in one tree."""
    return tl.reduce((a, b), 0, _add_pairs)


@triton.jit
def multiply_rounded(a, b):
    """Compute a * b, rounded, so that the compiler cannot contract it with an addition to an FMA.

    In a sum over lanes each lane adds its own value to the value of another lane (a butterfly).  With
    contraction, a lane would add its own unrounded product to the other lane's rounded one, and lanes would
    get different sums.  Where lanes write their copies of a sum to one place, the result would then be any
    of them.  This product is for sums over lanes that hold one term each; `multiply_for_uniform_sum` is for lanes
    that may hold several.
    """
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def multiply_for_uniform_sum(a, b, AXIS: tl.constexpr = -1):
    """Compute a * b for a sum along AXIS, so that the sum is the same number in all threads.

    Only the first product is a `multiply_rounded`.  If a thread holds all values of a sum, it starts with that one
    and adds the others by FMA, at no cost.  If several threads hold them, as with unaligned tensors, the
    compiler does not know which of them has the first, and contracts no product into the addition of another
    thread's.  A sum that starts at 0 does not prevent that: the compiler leaves out an addition of 0 to a square.
    """
    product = a * b
    axis: tl.constexpr = AXIS % len(product.shape)
    place = tl.arange(0, product.shape[axis])
    for _ in tl.static_range(axis):
        place = tl.expand_dims(place, 0)
    for _ in tl.static_range(len(product.shape) - 1 - axis):
        place = tl.expand_dims(place, -1)
    return tl.where(place == 0, multiply_rounded(a, b), product)


@triton.jit
def _select_larger(a, b):
    """Select the larger of two values, or NaN, in a reduction."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reduce_maximum(a, AXIS: tl.constexpr):
    """Reduce a tile to its largest value along AXIS, keeping the axis.

    The result is NaN if any element is NaN, unlike `tl.max`'s.
    """
    return tl.reduce(a, AXIS, _select_larger, keep_dims=True)
