"""Fused LayerNorm, RMSNorm and GroupNorm kernels, forward and backward, in Triton.

`layer_norm_forward`, `rms_norm_forward`, `group_norm_forward` and their `_backward` launch kernels on CUDA
tensors; `fusednorm.reference` has the same functions in plain torch for any device.
"""

from fusednorm.errors import KernelInputError, UnsupportedShapeError
from fusednorm.group_norm import group_norm_backward, group_norm_forward
from fusednorm.layer_norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from fusednorm.results import Backward, Forward

__all__ = [
    "Backward",
    "Forward",
    "KernelInputError",
    "UnsupportedShapeError",
    "group_norm_backward",
    "group_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]
