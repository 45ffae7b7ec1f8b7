"""The library's forward and backward functions on the CPU, quick: torch's fused kernels, fed in float32.

The same functions with the same arguments as `fusednorm.reference`, which stays the truth and does what is rare.
16-bit tensors are widened piece by piece, so that what is computed several times over stays in the cache, and
every row is computed by itself, so that its bits do not depend on its company.
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
