"""GroupNorm of [B, C, *spatial] on the CPU, contiguous or channels-last."""

import torch
from fusednorm import reference
from fusednorm.group_norm_checks import is_channels_last
from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.cpu.epilogue import activate_, summed, through_activation, widened


def group_norm_forward(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
) -> Forward:
    """See `fusednorm.reference.group_norm_forward`."""
    if dropout:
        return reference.group_norm_forward(
            x,
            num_groups,
            weight,
            bias,
            eps=eps,
            residual=residual,
            scale=scale,
            shift=shift,
            activation=activation,
            dropout=dropout,
            seed=seed,
            out_dtype=out_dtype,
            stats=stats,
        )
    h = _planes(summed(x, residual))
    z, mean, rstd = _normalise(h, num_groups, widened(weight), widened(bias), eps)
    y = activate_(_modulated(z, scale, shift), activation)
    return Forward(
        y=_like(x, y, out_dtype or x.dtype),
        mean=mean if stats else None,
        rstd=rstd if stats else None,
        residual_out=None if residual is None else _like(x, h, x.dtype),
    )


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """See `fusednorm.reference.group_norm_backward`."""
    if dropout:
        return reference.group_norm_backward(
            dy,
            x,
            num_groups,
            weight,
            bias,
            eps=eps,
            mean=mean,
            rstd=rstd,
            residual=residual,
            dresidual_out=dresidual_out,
            scale=scale,
            shift=shift,
            activation=activation,
            dropout=dropout,
            seed=seed,
        )
    w = widened(weight)
    h = _planes(summed(x, residual))
    z, own_mean, own_rstd = _normalise(h, num_groups, w, widened(bias), eps)
    if mean is None or rstd is None:
        mean, rstd = own_mean, own_rstd
    dz = through_activation(_planes(dy.float()), _modulated(z, scale, shift), activation)
    dscale, dshift = _modulation_gradients(dz, z, scale, shift)
    if scale is not None:
        dz = dz * _factor(scale)
    n, c, hw = h.shape
    # torch's kernel subtracts sums of dz·h from one another, which cancels when the mean is large; h without its
    # mean has the same gradient and nothing to cancel.
    centred = (h.view(n, num_groups, -1) - mean[..., None]).view(n, c, hw)
    needed = [True, weight is not None, bias is not None]
    dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(
        dz, centred, torch.zeros_like(mean), rstd, w, n, c, hw, num_groups, needed
    )
    if dresidual_out is not None:
        dx += _planes(dresidual_out)
    dx = _like(x, dx, x.dtype)
    return Backward(
        dx=dx,
        dweight=None if weight is None else dweight.to(weight.dtype),
        dbias=None if bias is None else dbias.to(bias.dtype),
        dresidual=None if residual is None else dx,
        dscale=dscale,
        dshift=dshift,
    )


def _planes(t: Tensor) -> Tensor:
    """[B, C, positions], contiguous; a copy when t is channels-last.

    torch's channels-last kernel takes the variance as E[h²] - mean², which is noise when the mean is large.
    """
    return t.flatten(2).contiguous() if t.dim() > 2 else t.unsqueeze(-1).contiguous()


def _normalise(
    h: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n, c, hw = h.shape
    return torch.native_group_norm(h, weight, bias, n, c, hw, num_groups, eps)


def _factor(scale: Tensor) -> Tensor:
    """1 + scale of each channel, over its positions."""
    return 1 + scale.float().unsqueeze(-1)


def _modulated(z: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """z * (1 + scale) + shift of [B, C, positions]; z itself without either."""
    if scale is not None:
        z = z * _factor(scale)
    return z if shift is None else z + shift.float().unsqueeze(-1)


def _modulation_gradients(
    dz: Tensor, z: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dscale and dshift [B, C]: the sums of dz * z and of dz over positions."""
    if scale is None and shift is None:
        return None, None
    # Summed together, since torch sums a lone row in another order than one of several.
    dscale, dshift = torch.stack((dz * z, dz)).sum(-1)
    return (
        None if scale is None else dscale.to(scale.dtype),
        None if shift is None else dshift.to(shift.dtype),
    )


def _like(x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of [B, C, positions] in x's shape and layout."""
    values = values.view(x.shape)
    if is_channels_last(x):
        return torch.empty_like(x, dtype=dtype).copy_(values)
    return values.to(dtype)
