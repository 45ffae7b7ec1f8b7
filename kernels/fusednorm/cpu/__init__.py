"""The operations on CPU tensors, quick: torch's own norms and their derivatives, other options around them.

The functions of `fusednorm.reference` with the same arguments and results, less `out_dtype` and `precision`.  What
torch's kernels do not take, or would not compute as well, the reference computes: float64, dropout, parameters of
heads, scale and shift, rows of RMSNorm beyond 65536 columns, and channels-last groups whose mean lies far from
zero.  So it does whatever its checks refuse.

torch takes statistics of contiguous memory by Welford's algorithm, so that a mean far from zero does not cancel;
of channels-last groups as E[x^2] - E[x]^2, where it does.  With 16-bit parameters it saves 16-bit statistics, and
the gradients of LayerNorm's parameters it sums in x's dtype: here both are float32.
"""

from fusednorm.cpu.groups import group_norm_backward, group_norm_forward
from fusednorm.cpu.rows import layer_norm_backward, layer_norm_forward, rms_norm_backward, rms_norm_forward

__all__ = [
    "group_norm_backward",
    "group_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]
