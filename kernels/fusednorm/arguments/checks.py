"""The input contract: checks that all launchers run before they allocate or launch anything."""

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from fusednorm.arguments.activations import ACTIVATIONS, Activation
from fusednorm.devices.device import INTERPRETED, stands_in
from fusednorm.errors import KernelInputError, UnsupportedShapeError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn
MAX_COLS = 2**30
"""The longest row: column numbers in kernels are 32-bit, also those of a block that extends past the row's end."""

MAX_HEADS = 65535
"""The limit of the second axis of a launch's grid, which counts heads."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def activation_of(name: str) -> Activation:
    """The activation of that name.

    Raises:
        KernelInputError: there is no such activation.
    """
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise KernelInputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return found


def is_number(value: object) -> bool:
    """Whether a value is a real number; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether a value is an int, or represents one while torch traces; a bool is not."""
    return type(value) is int or isinstance(value, torch.SymInt)


def check_dropout(dropout: float, seed: int | None) -> None:
    """Raises KernelInputError unless dropout is a number in [0, 1), with an int64 as its seed."""
    if not ((type(dropout) is float or is_number(dropout)) and 0.0 <= dropout < 1.0):
        raise KernelInputError(f"dropout must be in [0, 1), got {dropout}")
    if dropout and seed is None:
        raise KernelInputError("dropout needs a seed, got None")
    if seed is not None and not (is_integer(seed) and INT64_MIN <= seed <= INT64_MAX):
        raise KernelInputError(f"seed must be an int64, got {seed}")


def checked_eps(eps: float) -> float:
    """eps as a float: a kernel is compiled for the type of its arguments.

    Raises:
        KernelInputError: eps is not a number, negative, or not finite.
    """
    if not ((type(eps) is float or is_number(eps)) and eps >= 0.0 and math.isfinite(eps)):
        raise KernelInputError(f"eps must be at least 0 and finite, got {eps!r}")
    return float(eps)


def check_out_dtype(dtype: torch.dtype, *more: torch.dtype) -> None:
    """Raises KernelInputError unless y's dtype is one that x may have or one of `more`."""
    if dtype not in (*FLOAT_DTYPES, *more):
        *names, last = (str(each).removeprefix("torch.") for each in (*FLOAT_DTYPES, *more))
        raise KernelInputError(f"out_dtype must be {', '.join(names)} or {last}, got {dtype}")


def check_weight_offset(weight_offset: float, weight: Tensor | None) -> None:
    """Raises KernelInputError unless weight_offset is 0 or 1; without a weight it must be 0."""
    if weight_offset not in (0.0, 1.0):
        raise KernelInputError(f"weight_offset must be 0 or 1, got {weight_offset}")
    if weight_offset and weight is None:
        raise KernelInputError("weight_offset needs a weight, got None")


def check_tensor(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Check that a kernel can read a float tensor; with `like`, also that shape and device are those of `like`.

    Raises:
        KernelInputError: wrong dtype, device or shape, or a lazy negation (`torch.conj(z).imag`), whose memory
            holds values of the opposite sign.
    """
    if tensor.is_neg():
        raise _negation_error(name)
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelInputError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    if not tensor.is_cuda and not INTERPRETED and not stands_in(tensor.device):
        raise KernelInputError(f"{name} must be on a CUDA device, got {tensor.device}")
    if like is not None and like is not tensor:
        if tensor.device != like.device:
            raise KernelInputError(f"{name} must be on x's device {like.device}, got {tensor.device}")
        if tensor.shape != like.shape:
            raise KernelInputError(f"{name} must have x's shape {list(like.shape)}, got {list(tensor.shape)}")


def _negation_error(name: str) -> KernelInputError:
    return KernelInputError(f"{name} is a lazily negated view: kernels read memory, so call resolve_neg() first")


def has_heads(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether parameters are [heads, cols]: each head of x [..., heads, cols] has its own."""
    return (weight is not None and weight.ndim == 2) or (bias is not None and bias.ndim == 2)


def check_shape(name: str, parameter: Tensor, shape: torch.Size | tuple[int, ...], x: Tensor) -> None:
    """Raises KernelInputError unless the parameter has the shape that x needs; the message has both shapes."""
    if parameter.shape != shape:
        raise KernelInputError(f"x {list(x.shape)} needs {name} {list(shape)}, got {list(parameter.shape)}")


def check_parameter(name: str, parameter: Tensor | None, shape: torch.Size, x: Tensor) -> None:
    """Check that a parameter is None or a contiguous float tensor of `shape` on x's device.

    Raises:
        KernelInputError: wrong dtype, device or shape.
        UnsupportedShapeError: not contiguous.
    """
    if parameter is None:
        return
    check_tensor(name, parameter)
    if parameter.device != x.device:
        raise KernelInputError(f"{name} must be on x's device {x.device}, got {parameter.device}")
    check_shape(name, parameter, shape, x)
    if not parameter.is_contiguous():
        raise UnsupportedShapeError(f"{name} must be contiguous, got strides {list(parameter.stride())}")


def check_statistics(mean: Tensor | None, rstd: Tensor | None, shape: torch.Size, x: Tensor) -> None:
    """Check that saved statistics are each None or contiguous float32 of `shape` on x's device.

    Raises:
        KernelInputError: wrong dtype, device or shape, or a lazy negation.
        UnsupportedShapeError: not contiguous.
    """
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        if tensor is None:
            continue
        if tensor.is_neg():
            raise _negation_error(name)
        if tensor.dtype != torch.float32 or tensor.device != x.device or tensor.shape != shape:
            raise KernelInputError(
                f"{name} must be float32 {list(shape)} on {x.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise UnsupportedShapeError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def has_common_stride(tensor: Tensor) -> bool:
    """Whether the rows of [..., cols] are one constant stride apart."""
    if tensor.ndim < 3 or tensor.is_contiguous():
        return True
    try:
        tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return False
    return True


def as_rows(name: str, tensor: Tensor) -> Tensor:
    """[rows, cols] view of [..., cols] whose rows are one constant stride apart; never a copy.

    Raises:
        KernelInputError: the tensor has no axis, or its last axis is empty.
        UnsupportedShapeError: the rows are not one constant stride apart or have over 2^30 columns, or the last
            axis is not contiguous.
    """
    _check_last_axis(name, tensor)
    cols = tensor.shape[-1]
    if tensor.ndim == 2:
        return tensor
    try:
        return tensor.view(tensor.numel() // cols, cols)
    except RuntimeError:
        raise UnsupportedShapeError(
            f"the rows of {name} must lie one constant stride apart, "
            f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        ) from None


def as_heads(name: str, tensor: Tensor) -> Tensor:
    """[tokens, heads, cols] view of [..., heads, cols] whose tokens are one constant stride apart; never a copy.

    Raises:
        KernelInputError: the last axis is empty.
        UnsupportedShapeError: the tokens are not one constant stride apart, rows have over 2^30 columns, or the
            last axis is not contiguous.
    """
    _check_last_axis(name, tensor)
    if tensor.ndim == 3:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])
    except RuntimeError:
        raise UnsupportedShapeError(
            f"the rows of {name}, or its tokens of rows, must lie one constant stride apart, "
            f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        ) from None


def view_of_rows(own_parameters: bool, *tensors: Tensor | None) -> Callable[[str, Tensor], Tensor]:
    """`as_heads` if heads have parameters of their own or some tensor's rows no common stride; else `as_rows`."""
    if own_parameters:
        return as_heads
    for tensor in tensors:
        if tensor is not None and not has_common_stride(tensor):
            return as_heads
    return as_rows


def _check_last_axis(name: str, tensor: Tensor) -> None:
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise KernelInputError(f"{name} must be [..., cols] with cols >= 1, got {list(tensor.shape)}")
    if tensor.shape[-1] > MAX_COLS:
        raise UnsupportedShapeError(
            f"the rows of {name} must have at most {MAX_COLS} columns, got {tensor.shape[-1]}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise UnsupportedShapeError(
            f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}"
        )


def check_groups(x: Tensor, num_groups: int) -> None:
    """Check that x can be divided into groups.

    Raises:
        KernelInputError: x has no channel axis, num_groups is not an int or does not divide the number of channels,
            or a group is empty.
    """
    shape = list(x.shape)
    if x.dim() < 2:
        raise KernelInputError(f"x must be [N, C, *spatial], got {shape}")
    if not is_integer(num_groups):
        raise KernelInputError(f"num_groups must be an int, got {num_groups!r}")
    if num_groups < 1 or shape[1] % num_groups:
        raise KernelInputError(
            f"num_groups must be at least 1 and divide C = {shape[1]}, got num_groups = {num_groups}"
        )
    if any(size == 0 for size in shape[1:]):
        raise KernelInputError(f"x must have at least one element in each group, got {shape}")


def check_scale_and_shift(scale: Tensor | None, shift: Tensor | None, x: Tensor) -> None:
    """Check that scale and shift are each None or [N, C] on x's device: contiguous channels, equal row strides.

    Raises:
        KernelInputError: wrong dtype, device or shape.
        UnsupportedShapeError: the channels are not contiguous, or the strides differ.
    """
    strides = set()
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.device != x.device:
            raise KernelInputError(f"{name} must be on x's device {x.device}, got {tensor.device}")
        check_shape(name, tensor, x.shape[:2], x)
        if tensor.shape[1] > 1 and tensor.stride(1) != 1 and tensor.numel():
            raise UnsupportedShapeError(
                f"the channels of {name} must be contiguous, got strides {list(tensor.stride())}"
            )
        strides.add(tensor.stride(0))
    if len(strides) > 1 and x.shape[0] > 1:
        raise UnsupportedShapeError(
            f"scale and shift must have one stride from sample to sample, got {sorted(strides)}"
        )
