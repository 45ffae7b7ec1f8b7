"""y as float8_e4m3fn with one scale per row.

The scale is the row's largest |y| divided by 448, the type's largest value.  It is known only after activation and
dropout of the whole row, so y needs a third pass over the registers, or a third sweep over a row in memory.
Elements are multiplied by the reciprocal of the scale (one division per row) and rounded once, to nearest even.
"""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
"""The smallest normal float32; its reciprocal is finite, so that a row of zeros stays zero."""


@triton.jit
def compute_magnitude(y, mask, EVEN: tl.constexpr):
    """Compute |y|, and 0 in columns that do not exist.

    In these, a bias or an activation may have made y nonzero.
    """
    if EVEN:
        return tl.abs(y)
    else:
        return tl.where(mask, tl.abs(y), 0.0)


@triton.jit
def compute_float8_scale(largest):
    """Compute the float8 scale of rows whose largest magnitude is `largest`; NaN stays NaN."""
    return tl.maximum(largest * (1.0 / _LARGEST), _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
