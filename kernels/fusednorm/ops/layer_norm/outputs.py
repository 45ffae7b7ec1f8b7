"""Room for what LayerNorm and RMSNorm return."""

import torch
from torch import Tensor

from fusednorm.checks import FLOAT8
from fusednorm.outputs import refuse_unreturned, room
from fusednorm.results import Backward, Forward


def room_for_forward(
    x: Tensor, residual: Tensor | None, out_dtype: torch.dtype, stats: bool, is_rms: bool, out: Forward | None
) -> Forward:
    """Tensors for the results of a forward pass, those in `out` where it has some.

    Raises:
        KernelInputError: one of `out` does not fit its result, or has none.
    """
    y, mean, rstd, residual_out, scale = out or (None,) * 5
    of_rows = x.shape[:-1]
    result = Forward(
        y=room("y", y, x.shape, out_dtype, x),
        mean=room("mean", mean, of_rows, torch.float32, x) if stats and not is_rms else None,
        rstd=room("rstd", rstd, of_rows, torch.float32, x) if stats else None,
        residual_out=None if residual is None else room("residual_out", residual_out, x.shape, residual.dtype, x),
        scale=room("scale", scale, of_rows, torch.float32, x) if out_dtype == FLOAT8 else None,
    )
    refuse_unreturned(out, result)
    return result


def room_for_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: Backward | None
) -> Backward:
    """Tensors for the results of a backward pass, those in `out` where it has some.

    Raises:
        KernelInputError: one of `out` does not fit its result, or has none.
    """
    given_dx, given_dweight, given_dbias, given_dresidual, *_ = out or (None,) * 6
    dx = room("dx", given_dx, x.shape, x.dtype, x)
    dresidual = None if residual is None else dx
    if residual is not None and residual.dtype != x.dtype:
        dresidual = room("dresidual", given_dresidual, x.shape, residual.dtype, x)
    result = Backward(
        dx,
        None if weight is None else room("dweight", given_dweight, weight.shape, weight.dtype, x),
        None if bias is None else room("dbias", given_dbias, bias.shape, bias.dtype, x),
        dresidual,
    )
    refuse_unreturned(out, result)
    return result
