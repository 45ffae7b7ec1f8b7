"""The operations on CPU tensors in bounded memory, with bits that do not depend on the other rows of a batch.

The functions have the arguments of `fusednorm.reference`, except `parameter_gradients` and `precision`, and support
every option: dropout, float8, parameters for each head; scale, shift and gate; layouts.  The functions for rows
write a large y to memory that the caller gives.  Arguments are not checked.

16-bit tensors are converted in pieces, so that intermediates stay in the cache.  Statistics are torch's for
contiguous memory, and gradients do not cancel for a mean far from zero.  `fusednorm.cpu` takes less time for small
calls and for channels-last groups, which are copied here: the bits of torch's channels-last kernels depend on the
number of samples and threads.
"""

from fusednorm.cpu.batch_invariant.chain import layer_norm_chain
from fusednorm.cpu.batch_invariant.groups import group_norm_backward, group_norm_forward
from fusednorm.cpu.batch_invariant.row_norms import (
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
