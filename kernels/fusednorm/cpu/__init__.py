"""Fast operations on CPU tensors: torch's own norms and their derivatives, with the other options added.

The functions of `fusednorm.reference` with the same arguments and results, except `out_dtype` and `precision`.
`fusednorm.cpu.batch_invariant` computes calls that torch's kernels do not support or compute less accurately:
dropout, parameters for each head, scale, shift and gate (except scale and shift of float32 rows in forward passes),
backward passes without saved statistics, rows of RMSNorm with more than 65536 columns, and channels-last groups
whose mean is far from zero.  `fusednorm.cpu.fallback_passes` determines which of these the reference computes with
float64; it also handles all calls that the checks here reject.

torch computes statistics of contiguous memory by Welford's algorithm, which has no cancellation for a mean far
from zero, though the mean that it subtracts is rounded to float32; for channels-last groups it computes
E[x^2] - E[x]^2, which has.  With 16-bit parameters torch saves
16-bit statistics, and it sums the gradients of LayerNorm's parameters in x's dtype; here both are float32.
"""

from fusednorm.cpu.torch_group_norm import group_norm_backward, group_norm_forward
from fusednorm.cpu.torch_row_norms import (
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
