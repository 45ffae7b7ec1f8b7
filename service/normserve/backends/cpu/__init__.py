"""The library's forward and backward functions on the CPU, fast: torch's fused kernels in float32.

The functions have the same arguments as those of `fusednorm.reference`, which computes the rare cases.  16-bit
tensors are converted in pieces, so that intermediates stay in the cache.  Every row is computed separately, so
that its bits do not depend on the other rows.
"""

from normserve.backends.cpu.chain import layer_norm_chain
from normserve.backends.cpu.groups import group_norm_backward, group_norm_forward
from normserve.backends.cpu.rows import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

__all__ = [
    "group_norm_backward",
    "group_norm_forward",
    "layer_norm_backward",
    "layer_norm_chain",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]
