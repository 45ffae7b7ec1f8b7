"""The library's forward and backward functions on the CPU, quick where torch has a fused kernel."""

from fusednorm.reference import (
    group_norm_backward,
    group_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

__all__ = [
    "group_norm_backward",
    "group_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]
