"""Room for what GroupNorm returns."""

import torch
from torch import Tensor

from fusednorm.checks import check_tensor
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.outputs import refuse_unreturned, room, room_like
from fusednorm.results import Backward, Forward


def room_for_forward(
    x: Tensor, sample: Sample, residual: Tensor | None, out_dtype: torch.dtype, stats: bool, out: Forward | None
) -> Forward:
    """Tensors for the results of a forward pass, those in `out` where it has some.

    Raises:
        KernelInputError: an `out_dtype` that is none, or one of `out` does not fit its result, or has none.
    """
    y, mean, rstd, residual_out, _ = out or (None,) * 5
    channels_last = sample.channels_last
    y = room_like("y", y, x, out_dtype, channels_last)
    check_tensor("out_dtype", y)
    of_groups = (x.shape[0], sample.groups)
    result = Forward(
        y,
        mean=room("mean", mean, of_groups, torch.float32, x) if stats else None,
        rstd=room("rstd", rstd, of_groups, torch.float32, x) if stats else None,
        residual_out=None
        if residual is None
        else room_like("residual_out", residual_out, x, x.dtype, channels_last),
    )
    refuse_unreturned(out, result)
    return result


def room_for_backward(
    x: Tensor, sample: Sample, parameters: tuple[Tensor | None, ...], residual: bool, out: Backward | None
) -> Backward:
    """Tensors for the results of a backward pass, those in `out` where it has some.

    Args:
        parameters: weight, bias, scale and shift, which have gradients.

    Raises:
        KernelInputError: one of `out` does not fit its result, or has none.
    """
    given = out or (None,) * 6
    dx = room_like("dx", given[0], x, x.dtype, sample.channels_last)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else room(name, place, parameter.shape, parameter.dtype, x)
        for name, parameter, place in zip(
            ("dweight", "dbias", "dscale", "dshift"), parameters, (*given[1:3], *given[4:]), strict=True
        )
    )
    result = Backward(dx, dweight, dbias, dx if residual else None, dscale, dshift)
    refuse_unreturned(out, result)
    return result
