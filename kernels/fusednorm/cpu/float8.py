"""Rows in float8_e4m3fn, each with its own scale."""

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The smallest normal float32: it keeps a row of zeros zero.
_SMALLEST_SCALE = 2.0**-126


def scale_rows_(y: Tensor) -> Tensor:
    """Divide rows [rows, cols] by their scales, in y's memory; a copy in float8_e4m3fn rounds them.

    The same bits as `fusednorm.reference.float8.quantise_rows`, without copies of y.

    Returns: the scales [rows].
    """
    least, most = torch.aminmax(y, dim=-1)
    scale = torch.maximum(least.neg_(), most).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE)
    y.div_(scale.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)
    return scale
