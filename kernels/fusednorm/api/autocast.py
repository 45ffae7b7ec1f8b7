"""The dtypes of norms under autocast."""

import torch
from torch import Tensor

AUTOCASTS_RMS_NORM = bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"))
"""Whether CUDA's autocast casts rms_norm, as in newer versions of torch."""

_any_autocast = torch._C._is_any_autocast_enabled


def casts_to_float32(x: Tensor) -> bool:
    """Return whether autocast makes norms of x compute and return float32.

    CUDA's does, the CPU's does not.
    """
    return _any_autocast() and x.is_cuda and torch.is_autocast_enabled("cuda")
