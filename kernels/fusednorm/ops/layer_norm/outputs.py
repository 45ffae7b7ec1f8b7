"""The results of LayerNorm's and RMSNorm's passes."""

import torch
from torch import Tensor

from fusednorm.arguments.checks import FLOAT8
from fusednorm.arguments.outputs import Output, Outputs


def forward_outputs(residual: Tensor | None, dtype: torch.dtype, stats: bool, is_rms: bool) -> Outputs:
    """The outputs of a forward pass whose y has the given dtype, one per field of `Forward`."""
    return (
        Output("y", dtype),
        Output("mean", torch.float32, axes_less=1) if stats and not is_rms else None,
        Output("rstd", torch.float32, axes_less=1) if stats else None,
        None if residual is None else Output("residual_out", residual.dtype),
        Output("scale", torch.float32, axes_less=1) if dtype == FLOAT8 else None,
    )


def backward_outputs(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Outputs:
    """The outputs of a backward pass, one per field of `Backward`; no gradient for a parameter that is None."""
    dx = Output("dx", x.dtype)
    dresidual = None if residual is None else dx
    if residual is not None and residual.dtype != x.dtype:
        dresidual = Output("dresidual", residual.dtype)
    return (
        dx,
        None if weight is None else Output("dweight", weight.dtype, weight.shape),
        None if bias is None else Output("dbias", bias.dtype, bias.shape),
        dresidual,
        None,
        None,
    )
