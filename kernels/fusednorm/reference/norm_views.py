"""The view of a call's tensors with which the reference computes each operation by the same code."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusednorm.arguments.checks import (
    check_gate,
    check_groups,
    check_weight_offset,
    count_samples,
    has_heads,
    select_modulations,
)
from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float, check_optional_tensor, check_precision
from fusednorm.tensors.arrays import check_tensors
from fusednorm.tensors.layouts import is_channels_last


@dataclass(frozen=True)
class NormView:
    """Shapes, axes and dtypes with which the same code computes LayerNorm, RMSNorm and GroupNorm.

    x is viewed as an array of `shape` and normalised over `axes`.

    Parameters broadcast as `parameter_shape`; their gradients are sums over `parameter_axes`.
    `rows` x `positions` is the grid on which dropout's mask is defined, and `convert_mask` converts a mask of that
    grid to `shape`.  `work_dtype` is the dtype of every sum, `residual_dtype` that of residual_out and dresidual;
    `weight_offset` is added to weight.  `scale` and `shift` of a sample are applied after the affine step, and
    `gate` multiplies x; they broadcast as `sample_shape`, and their gradients are sums over `sample_axis`.  Results
    of x's shape are channels-last in memory if `channels_last`, else contiguous.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    statistics_shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]
    parameter_axes: tuple[int, ...]
    rows: int
    positions: int
    convert_mask: Callable[[Tensor], Tensor]
    work_dtype: torch.dtype
    residual_dtype: torch.dtype
    subtracts_mean: bool = True
    weight_offset: float = 0.0
    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None
    sample_shape: tuple[int, ...] = ()
    sample_axis: int = -1
    channels_last: bool = False


def check_and_view_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    gate: Tensor | None,
    *,
    centre: bool,
    precision: torch.dtype | None,
) -> NormView:
    """Check the arguments of LayerNorm or RMSNorm, and make the view with which they are computed."""
    check_float("x", x)
    check_tensors(("weight", "bias", "scale", "shift", "gate"), (weight, bias, scale, shift, gate))
    check_weight_offset(weight_offset, weight)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise KernelInputError(f"x must be [..., cols] with cols >= 1, got {list(x.shape)}")
    own = has_heads(weight, bias)
    check_gate(gate, residual)
    modulations = select_modulations(scale, shift, gate)
    for name, each in modulations.items():
        check_optional_tensor(name, each, x, tuple(each.shape))
    if modulations and own:
        names = " and ".join(modulations)
        raise KernelInputError(f"parameters must be [cols] in a call with {names}, got parameters of each head")
    samples = count_samples(tuple(x.shape), modulations) if modulations else 1
    of_parameters = x.shape[-2:] if own else x.shape[-1:]
    check_optional_tensor("weight", weight, x, of_parameters)
    check_optional_tensor("bias", bias, x, of_parameters)
    check_optional_tensor("residual", residual, x)
    cols, heads = x.shape[-1], x.shape[-2] if own else 1
    tokens = math.prod(x.shape[:-2] if own else x.shape[:-1])
    shape = (samples, tokens // max(samples, 1), cols) if modulations else (tokens, heads, cols)
    return NormView(
        shape=shape,
        axes=(2,),
        statistics_shape=tuple(x.shape[:-1]),
        parameter_shape=(1, heads, cols),
        parameter_axes=(0, 1) if modulations else (0,),
        rows=tokens * heads,
        positions=cols,
        convert_mask=lambda mask: mask.view(shape),
        work_dtype=_select_work_dtype(x, precision),
        residual_dtype=x.dtype if residual is None else residual.dtype,
        subtracts_mean=centre,
        weight_offset=weight_offset,
        scale=scale,
        shift=shift,
        gate=gate,
        sample_shape=(samples, 1, cols),
        sample_axis=1,
    )


def check_and_view_groups(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    precision: torch.dtype | None,
) -> NormView:
    """Check the arguments of GroupNorm, and make the view with which they are computed."""
    check_float("x", x)
    check_groups(x, num_groups)
    for name, parameter, of_parameter in (
        ("weight", weight, x.shape[1:2]),
        ("bias", bias, x.shape[1:2]),
        ("scale", scale, x.shape[:2]),
        ("shift", shift, x.shape[:2]),
    ):
        check_optional_tensor(name, parameter, x, of_parameter)
    check_optional_tensor("residual", residual, x)
    n, c = x.shape[:2]
    hw = math.prod(x.shape[2:])
    shape = (n, num_groups, c // num_groups, hw)
    channels_last = is_channels_last(x)

    def convert_mask(mask: Tensor) -> Tensor:
        return (mask.view(n, hw, c).transpose(1, 2) if channels_last else mask).reshape(shape)

    return NormView(
        shape=shape,
        axes=(2, 3),
        statistics_shape=(n, num_groups),
        parameter_shape=(1, num_groups, c // num_groups, 1),
        parameter_axes=(0, 3),
        rows=n,
        positions=c * hw,
        convert_mask=convert_mask,
        work_dtype=_select_work_dtype(x, precision),
        residual_dtype=x.dtype,
        scale=scale,
        shift=shift,
        sample_shape=(n, num_groups, c // num_groups, 1),
        channels_last=channels_last,
    )


def _select_work_dtype(x: Tensor, precision: torch.dtype | None) -> torch.dtype:
    """Select the dtype of all arithmetic: `precision` if given, else float64 for a float64 x, else float32."""
    check_precision(precision)
    if precision is not None:
        return precision
    return torch.float64 if x.dtype == torch.float64 else torch.float32
