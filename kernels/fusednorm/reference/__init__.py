"""The operations in plain torch, for any device; the tests compare the kernels with them."""

from fusednorm.reference import chain
from fusednorm.reference.reference_passes import (
    group_norm_backward,
    group_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

__all__ = [
    "chain",
    "group_norm_backward",
    "group_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]
