"""Reductions that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def sum_pair(a, b, AXIS: tl.constexpr, FAST: tl.constexpr):
    """Sums of a and of b along AXIS, keeping the axis.

    FAST takes both through one reduction tree, so one round of shuffles and one barrier; the interpreter
    would run that element by element and gets two sums.
    """
    if FAST:
        total_a, total_b = tl.reduce((a, b), AXIS, _add_pairs, keep_dims=True)
    else:
        total_a = tl.sum(a, AXIS, keep_dims=True)
        total_b = tl.sum(b, AXIS, keep_dims=True)
    return total_a, total_b
