"""The reference of float8 results: rows divided by their scale and rounded, in plain torch."""

import torch
from torch import Tensor

from fusednorm.tensors.arrays import FLOAT8

LARGEST = torch.finfo(FLOAT8).max
SMALLEST_SCALE = 2.0**-126


def quantise_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of y to float8_e4m3fn; return the quantised rows and their scales, in y's dtype.

    A quantised row is y / scale, with scale = max(largest |y| of the row / 448, 2^-126).

    2^-126 is the smallest normal float32: with it a row of zeros stays zero.  The scale of a row with a NaN or an
    infinity is NaN or infinite too, and every element times the scale is NaN.

    Args:
        y: [..., cols], float32 or float64.

    Returns:
        The quantised rows [..., cols], the scales [...].
    """
    scale = (y.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
    return (y / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FLOAT8), scale
