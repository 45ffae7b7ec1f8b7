"""torch's norms by this library's functions: with any normalized_shape, and in the dtypes of autocast."""

from typing import Any

import torch
from torch import Tensor

from fusednorm.api.autograd import group_norm, layer_norm, rms_norm
from fusednorm.arguments.checks import LayoutName
from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float
from fusednorm.tensors.arrays import check_tensors

AUTOCASTS_RMS_NORM = bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"))
"""Whether CUDA's autocast casts rms_norm, as in newer versions of torch."""

_any_autocast = torch._C._is_any_autocast_enabled


def casts_to_float32(x: Tensor) -> bool:
    """Return whether CUDA's autocast is active for x: norms are then computed and returned in float32.

    The CPU's autocast does not change the dtype of norms.
    """
    return _any_autocast() and x.is_cuda and torch.is_autocast_enabled("cuda")


_LOW_PRECISION = (torch.float16, torch.bfloat16)


def compute_layer_norm_over_shape(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layout: LayoutName | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute `layer_norm` of x as torch's module does: in float32 under CUDA's autocast.

    The axes are the last ones, normalized_shape, or with a layout the channels.  `options` are further
    arguments of `layer_norm`.

    Raises:
        KernelInputError: x ends in other axes, or the function refuses an argument.
    """
    if x.dtype in _LOW_PRECISION and casts_to_float32(x):
        x = x.float()
    if layout is not None:
        _check_normalized_channels(x, normalized_shape)
        return layer_norm(x, weight, bias, eps, scale=scale, shift=shift, layout=layout, **options)
    # Most shapes have one axis; then the function checks x against the weight, which costs the host nothing here.
    if len(normalized_shape) == 1 and weight is not None:
        try:
            return layer_norm(x, weight, bias, eps, scale=scale, shift=shift, **options)
        except KernelInputError:
            _check_normalized_axes("x", x, normalized_shape)
            raise
    rows = _flatten_normalized_axes("x", x, normalized_shape)
    scale, shift = (
        each if each is None else _flatten_normalized_axes(name, each, normalized_shape)
        for name, each in (("scale", scale), ("shift", shift))
    )
    weight, bias = (
        _flatten_parameter("weight", weight, normalized_shape),
        _flatten_parameter("bias", bias, normalized_shape),
    )
    y = layer_norm(rows, weight, bias, eps, scale=scale, shift=shift, **options)
    return y.view(x.shape)


def compute_rms_norm_module(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    eps: float | None,
    layout: LayoutName | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute `rms_norm` of x in the same dtype as torch's module, also under CUDA's autocast.

    The axes are the last ones, normalized_shape, or with a layout the channels.  `options` are further
    arguments of `rms_norm`.  An eps of None is the machine epsilon of the dtype in which torch computes.

    Raises:
        KernelInputError: x ends in other axes, or the function refuses an argument.
    """
    if AUTOCASTS_RMS_NORM and x.dtype in _LOW_PRECISION and casts_to_float32(x):
        x = x.float()
    if eps is None:
        check_float("x", x)
        # The epsilon of the dtype in which torch computes, which for float16 and bfloat16 is float32.
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    if layout is not None:
        _check_normalized_channels(x, normalized_shape)
        return rms_norm(x, weight, eps, scale=scale, shift=shift, layout=layout, **options)
    if len(normalized_shape) == 1 and weight is not None:
        try:
            return rms_norm(x, weight, eps, scale=scale, shift=shift, **options)
        except KernelInputError:
            _check_normalized_axes("x", x, normalized_shape)
            raise
    rows = _flatten_normalized_axes("x", x, normalized_shape)
    scale, shift = (
        each if each is None else _flatten_normalized_axes(name, each, normalized_shape)
        for name, each in (("scale", scale), ("shift", shift))
    )
    weight = _flatten_parameter("weight", weight, normalized_shape)
    return rms_norm(rows, weight, eps, scale=scale, shift=shift, **options).view(x.shape)


def compute_group_norm_module(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    **others: Any,
) -> Tensor:
    """Compute `group_norm` of x as torch's module does: in float32 under CUDA's autocast.

    x is [N, C, *spatial].  `others` are further arguments of `group_norm`.

    Raises:
        KernelInputError: the function refuses an argument.
    """
    if x.dtype in _LOW_PRECISION and casts_to_float32(x):
        x = x.float()
    return group_norm(x, num_groups, weight, bias, eps, **others)


def compute_scripted_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float | None,
    weight_offset: float,
    activation: str,
    negative_slope: float,
    is_rms: bool,
    layout: str | None,
) -> Tensor:
    """Compute LayerNorm or RMSNorm in a module that TorchScript compiles.

    It is over normalized_shape or, with a layout, over channels.
    TorchScript can call the operators `torch.ops.fusednorm`, but not this package's Python functions.
    """
    rows = x
    if layout is not None:
        if list(x.shape)[1:2] != normalized_shape:
            raise RuntimeError(f"x must have channels {normalized_shape}, got {x.shape}")
    else:
        rows = x.flatten(-len(normalized_shape))
        if list(x.shape)[-len(normalized_shape) :] != normalized_shape:
            raise RuntimeError(f"x must end in normalized_shape {normalized_shape}, got {x.shape}")
    weight = None if weight is None else weight.flatten()
    bias = None if bias is None else bias.flatten()
    scale = None if scale is None else scale.flatten(-len(normalized_shape))
    shift = None if shift is None else shift.flatten(-len(normalized_shape))
    if eps is None:
        eps = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
    if is_rms:
        y: Tensor = torch.ops.fusednorm.rms_norm(
            rows, weight, None, None, scale, shift,
            0, eps, weight_offset, activation, 0.0, 0, negative_slope, layout,
        )[0]  # fmt: skip
    else:
        y = torch.ops.fusednorm.layer_norm(
            rows, weight, bias, None, scale, shift,
            0, eps, weight_offset, activation, 0.0, 0, negative_slope, layout,
        )[0]  # fmt: skip
    return y.view(x.shape)


def _check_normalized_channels(x: Tensor, normalized_shape: tuple[int, ...]) -> None:
    """Raise KernelInputError unless the channels of x [N, C, *spatial] are normalized_shape."""
    if tuple(x.shape[1:2]) != tuple(normalized_shape):
        raise KernelInputError(
            f"x must be [N, C, *spatial] with the channels {list(normalized_shape)}, got {list(x.shape)}"
        )


def _flatten_normalized_axes(name: str, x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """Merge the last axes of a tensor, which must have the sizes normalized_shape, into one axis.

    Raises:
        KernelInputError: the tensor has another shape, or normalized_shape has no axes.
    """
    _check_normalized_axes(name, x, normalized_shape)
    return x.flatten(-len(normalized_shape))


def _check_normalized_axes(name: str, x: Tensor, normalized_shape: tuple[int, ...]) -> None:
    """Raise KernelInputError unless a tensor ends in the sizes normalized_shape, of at least one axis."""
    check_tensors((name,), (x,))
    axes = len(normalized_shape)
    if not axes or tuple(x.shape[-axes:]) != tuple(normalized_shape):
        raise KernelInputError(
            f"{name} must end in normalized_shape {list(normalized_shape)}, of at least one axis, "
            f"got {list(x.shape)}"
        )


def _flatten_parameter(name: str, parameter: Tensor | None, normalized_shape: tuple[int, ...]) -> Tensor | None:
    """Reshape a parameter [*normalized_shape] to one axis; None stays None.

    Raises:
        KernelInputError: it has another shape.
    """
    if parameter is None:
        return None
    if tuple(parameter.shape) != tuple(normalized_shape):
        raise KernelInputError(f"{name} must be {list(normalized_shape)}, got {list(parameter.shape)}")
    return parameter.flatten()
