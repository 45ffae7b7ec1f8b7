"""The input contract: checks that all launchers run before they allocate or launch anything.

They read descriptions of arrays; `tensors.arrays` checks what only tensors have, devices and lazy negations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, cast, get_args

from fusednorm.arguments.arrays import FLOAT_DTYPES, Array, contiguous_strides, merge_axes
from fusednorm.errors import KernelInputError, UnsupportedShapeError

ActivationName = Literal["none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh"]
"""The names of activations, which may follow the affine step; gelu is by erf, gelu_tanh by tanh."""

ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)

DEFAULT_SLOPE = 0.01
"""The default of `negative_slope`, as in torch; other activations than leaky_relu allow no other value."""

LayoutName = Literal["nchw"]
"""The names of layouts: in "nchw" the axis that is normalised over is axis 1, the channels of [N, C, *spatial]."""

MAX_COLS = 2**30
"""The longest row: column numbers in kernels are 32-bit, also those of a block that extends past the row's end."""

_MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""The largest value of options that kernels take as float32."""

MAX_HEADS = 65535
"""The limit of the second axis of a launch's grid, which counts heads."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def validate_activation(name: str | None) -> ActivationName:
    """Check the name of an activation and return it, "none" for None.

    Raises:
        KernelInputError: there is no activation of that name.
    """
    if name is None:
        return "none"
    if not (isinstance(name, str) and name in ACTIVATIONS):
        raise KernelInputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return cast(ActivationName, name)


def validate_negative_slope(negative_slope: float, activation: str) -> float:
    """Check leaky_relu's slope and return it as a float, since a kernel is compiled for the types of its arguments.

    Raises:
        KernelInputError: the slope is not a finite number, or not the default with another activation.
    """
    is_float = type(negative_slope) is float or is_number(negative_slope)
    if not (is_float and abs(negative_slope) <= _MAX_FLOAT32):
        raise KernelInputError(f"negative_slope must be a finite number, got {negative_slope!r}")
    if negative_slope != DEFAULT_SLOPE and activation != "leaky_relu":
        raise KernelInputError(f"negative_slope needs activation leaky_relu, got {activation!r}")
    return float(negative_slope)


def is_number(value: object) -> bool:
    """Return whether a value is a real number; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an int, or stands for an int while torch traces; a bool is not."""
    return type(value) is int or type(value).__name__ == "SymInt"


def is_shape(value: object) -> bool:
    """Return whether a value is a size or a sequence of sizes, as torch's normalized_shape."""
    sizes = value if isinstance(value, Sequence) else (value,)
    return all(type(size) is int for size in sizes)


def check_layout(layout: str | None) -> None:
    """Raise KernelInputError unless the layout is None, for rows along the last axis, or "nchw"."""
    if layout is not None and layout not in get_args(LayoutName):
        remedy = ": rows along the last axis need no layout" if layout == "nhwc" else ""
        raise KernelInputError(f'layout must be None or "nchw", got {layout!r}{remedy}')


def check_dropout(dropout: float, seed: int | None) -> None:
    """Raise KernelInputError unless dropout is a number in [0, 1) and the seed is an int64.

    Without dropout the seed may be None.
    """
    if not ((type(dropout) is float or is_number(dropout)) and 0.0 <= dropout < 1.0):
        raise KernelInputError(f"dropout must be in [0, 1), got {dropout}")
    if dropout and seed is None:
        raise KernelInputError("dropout needs a seed, got None")
    if seed is not None and not (is_integer(seed) and INT64_MIN <= seed <= INT64_MAX):
        raise KernelInputError(f"seed must be an int of 64 bits, got {seed!r}")


def validate_eps(eps: float) -> float:
    """Check eps and return it as a float, since a kernel is compiled for the types of its arguments.

    Raises:
        KernelInputError: eps is not a number, negative, or not finite.
    """
    if not ((type(eps) is float or is_number(eps)) and 0.0 <= eps <= _MAX_FLOAT32):
        raise KernelInputError(f"eps must be at least 0 and finite, got {_describe_eps(eps)}")
    return float(eps)


def _describe_eps(eps: object) -> str:
    """Describe an eps that is refused, with the number to write in its place if that is known."""
    if eps is None:
        return "None: torch.nn.RMSNorm's default is torch.finfo(torch.float32).eps (of float64 for a float64 x)"
    if isinstance(eps, str):
        return f"the str {eps!r}: write float(eps)"
    return repr(eps) if is_number(eps) or isinstance(eps, bool) else type(eps).__name__


def check_out_dtype(dtype: str, *also_allowed: str) -> None:
    """Raise KernelInputError unless a dtype of y is one that x may have, or one of `also_allowed`.

    A kernel that writes float8 allows that dtype, too.
    """
    if dtype not in (*FLOAT_DTYPES, *also_allowed):
        *names, last = (*FLOAT_DTYPES, *also_allowed)
        raise KernelInputError(f"out_dtype must be {', '.join(names)} or {last}, got {dtype}")


def check_weight_offset(weight_offset: float, weight: object) -> None:
    """Raise KernelInputError unless weight_offset is 0 or 1; without a weight it must be 0."""
    if weight_offset not in (0.0, 1.0):
        raise KernelInputError(f"weight_offset must be 0 or 1, got {weight_offset}")
    if weight_offset and weight is None:
        raise KernelInputError("weight_offset needs a weight, got None")


def check_float(name: str, array: Array, shape_like: Array | None = None) -> None:
    """Raise unless an array has a float dtype that kernels read, and the shape of `shape_like` if that is given.

    Raises:
        KernelInputError: wrong dtype or shape.
    """
    if array.dtype not in FLOAT_DTYPES:
        raise KernelInputError(f"{name} must be float32, float16 or bfloat16, got {array.dtype}")
    if shape_like is not None and array.shape != shape_like.shape:
        raise KernelInputError(f"{name} must have x's shape {list(shape_like.shape)}, got {list(array.shape)}")


def has_heads(weight: Any, bias: Any) -> bool:
    """Return whether parameters are [heads, cols]: separate ones for each head of x [..., heads, cols]."""
    first = bias if weight is None else weight
    return first is not None and first.ndim == 2


def check_shape(name: str, parameter: Any, shape: tuple[int, ...], x: Any) -> None:
    """Raise KernelInputError unless the parameter has the shape that x needs; the message has both shapes."""
    if parameter.shape != shape:
        raise KernelInputError(f"x {list(x.shape)} needs {name} {list(shape)}, got {list(parameter.shape)}")


def check_parameter(name: str, parameter: Array | None, shape: tuple[int, ...], x: Array) -> None:
    """Raise unless a parameter is None, or a contiguous array of floats with the shape that x needs.

    Raises:
        KernelInputError: wrong dtype or shape.
        UnsupportedShapeError: not contiguous.
    """
    if parameter is None:
        return
    check_float(name, parameter)
    check_shape(name, parameter, shape, x)
    if not parameter.is_dense:
        raise UnsupportedShapeError(f"{name} must be contiguous, got strides {list(parameter.strides)}")


def check_statistics(mean: Array | None, rstd: Array | None, shape: tuple[int, ...]) -> None:
    """Raise unless the saved mean and rstd are each None, or contiguous float32 arrays of `shape`.

    Raises:
        KernelInputError: wrong dtype or shape.
        UnsupportedShapeError: not contiguous.
    """
    for name, array in (("mean", mean), ("rstd", rstd)):
        if array is None:
            continue
        if array.dtype != "float32" or array.shape != shape:
            raise KernelInputError(f"{name} must be float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
        if not array.is_dense:
            raise UnsupportedShapeError(f"{name} must be contiguous, got strides {list(array.strides)}")


def has_common_stride(array: Array) -> bool:
    """Return whether the rows of [..., cols] are one constant stride apart."""
    if array.is_dense or len(array.shape) < 3:
        return True
    return merge_axes(array.shape[:-1], array.strides[:-1]) is not None


def view_as_rows(name: str, array: Array) -> Array:
    """View an array [..., cols] as [rows, cols], or raise if its strides do not allow this.

    Raises:
        KernelInputError: the array has no axis, or its last axis is empty.
        UnsupportedShapeError: the rows are not one constant stride apart or have over 2^30 columns, or the last
            axis is not contiguous.
    """
    _check_last_axis(name, array)
    shape, strides = array.shape, array.strides
    if len(shape) == 2:
        return array
    rows = (math.prod(shape[:-1]), shape[-1])
    if array.is_dense:
        return array.view(rows, contiguous_strides(rows))
    stride = merge_axes(shape[:-1], strides[:-1])
    if stride is None:
        raise UnsupportedShapeError(
            f"the rows of {name} must lie one constant stride apart, "
            f"got shape {list(shape)} with strides {list(strides)}"
        )
    return array.view(rows, (stride, strides[-1]))


def view_as_heads(name: str, array: Array) -> Array:
    """View an array [..., heads, cols] as [tokens, heads, cols], or raise if its strides do not allow this.

    Raises:
        KernelInputError: the last axis is empty.
        UnsupportedShapeError: the tokens are not one constant stride apart, rows have over 2^30 columns, or the
            last axis is not contiguous.
    """
    _check_last_axis(name, array)
    shape, strides = array.shape, array.strides
    if len(shape) == 3:
        return array
    stride = merge_axes(shape[:-2], strides[:-2])
    if stride is None:
        raise UnsupportedShapeError(
            f"the rows of {name}, or its tokens of rows, must lie one constant stride apart, "
            f"got shape {list(shape)} with strides {list(strides)}"
        )
    return array.view((math.prod(shape[:-2]), *shape[-2:]), (stride, *strides[-2:]))


def select_row_view(own_parameters: bool, *arrays: Array | None) -> Callable[[str, Array], Array]:
    """Return the function with which a call views its arrays, as [rows, cols] or as [tokens, heads, cols].

    It is `view_as_heads` if heads have separate parameters, or the rows of an array have no common stride;
    else `view_as_rows`.
    """
    if own_parameters:
        return view_as_heads
    for array in arrays:
        if array is not None and not has_common_stride(array):
            return view_as_heads
    return view_as_rows


def _check_last_axis(name: str, array: Array) -> None:
    """Raise unless the last axis is contiguous and has 1 to `MAX_COLS` elements."""
    cols = array.shape[-1] if array.shape else 0
    if cols == 0:
        raise KernelInputError(f"{name} must be [..., cols] with cols >= 1, got {list(array.shape)}")
    if cols > MAX_COLS:
        raise UnsupportedShapeError(f"the rows of {name} must have at most {MAX_COLS} columns, got {cols}")
    if cols > 1 and array.strides[-1] != 1 and 0 not in array.shape:
        raise UnsupportedShapeError(
            f"{name} must be contiguous along its last axis, got strides {list(array.strides)}"
        )


def check_groups(x: Any, num_groups: int) -> None:
    """Raise unless the channels of x can be divided into `num_groups` groups, and no group is empty.

    Raises:
        KernelInputError: x has no channel axis, num_groups is not an int or does not divide the number of channels,
            or a group is empty.
    """
    shape = list(x.shape)
    if len(shape) < 2:
        raise KernelInputError(f"x must be [N, C, *spatial], got {shape}")
    if not is_integer(num_groups):
        given = repr(num_groups) if isinstance(num_groups, Real | str | None) else type(num_groups).__name__
        raise KernelInputError(f"num_groups must be an int, got {given}")
    if num_groups < 1 or shape[1] % num_groups:
        raise KernelInputError(
            f"num_groups must be at least 1 and divide C = {shape[1]}, got num_groups = {num_groups}"
        )
    if any(size == 0 for size in shape[1:]):
        raise KernelInputError(f"x must have at least one element in each group, got {shape}")


def check_channels(x: Any, weight: Any, bias: Any) -> None:
    """Raise KernelInputError unless x has channels, along axis 1, and no parameter is one of heads."""
    if len(x.shape) < 2 or x.shape[1] == 0:
        raise KernelInputError(f'layout "nchw" needs x [N, C, *spatial] with C >= 1, got {list(x.shape)}')
    if has_heads(weight, bias):
        raise KernelInputError('layout "nchw" needs parameters [C], got parameters of each head')
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and tuple(parameter.shape) != tuple(x.shape[1:2]):
            wanted, got = list(x.shape[1:2]), list(parameter.shape)
            raise KernelInputError(f'with layout "nchw" x {list(x.shape)} needs {name} {wanted}, got {got}')


def check_channel_modulations(modulations: Mapping[str, Array], x: Array) -> None:
    """Raise unless each modulation is [N, C] of x [N, C, *spatial], with strides that a kernel supports.

    Its channels must be contiguous, and all must have one stride between samples.

    Raises:
        KernelInputError: wrong dtype or shape.
        UnsupportedShapeError: the channels are not contiguous, or the strides differ.
    """
    strides = set()
    for name, array in modulations.items():
        check_float(name, array)
        check_shape(name, array, x.shape[:2], x)
        if array.shape[1] > 1 and array.strides[1] != 1 and 0 not in array.shape:
            raise UnsupportedShapeError(
                f"the channels of {name} must be contiguous, got strides {list(array.strides)}"
            )
        strides.add(array.strides[0])
    if len(strides) > 1 and x.shape[0] > 1:
        raise UnsupportedShapeError(
            f"{' and '.join(modulations)} must have one stride from sample to sample, got {sorted(strides)}"
        )


def select_modulations(scale: Any, shift: Any, gate: Any) -> dict[str, Any]:
    """Select the tensors of each sample that are not None, by name."""
    given = {"scale": scale, "shift": shift, "gate": gate}
    return {name: array for name, array in given.items() if array is not None}


def check_gate(gate: Any, residual: Any) -> None:
    """Raise KernelInputError for a gate without a residual, to which gate * x would be added."""
    if gate is not None and residual is None:
        raise KernelInputError("gate needs a residual, got None: multiply x, or use scale")


def require_residual(residual: Any, op: str) -> None:
    """Raise KernelInputError if `residual`, which add_<op> adds to x, is None: there would be no sum to return."""
    if residual is None:
        raise KernelInputError(f"add_{op} needs a residual, got None: without one call {op}")


def count_samples(shape: tuple[int, ...], modulations: Mapping[str, Any]) -> int:
    """Count the samples of rows [..., cols]: the groups of consecutive rows that share a row of each modulation.

    Each of `modulations` has the shape of some leading axes of x and its last axis, with axes of one element
    between them or without.

    Raises:
        KernelInputError: another shape, or two that differ.
    """
    samples: dict[str, int] = {}
    for name, array in modulations.items():
        leading = tuple(array.shape[:-1])
        while leading and leading[-1] == 1 and leading != tuple(shape[: len(leading)]):
            leading = leading[:-1]
        if (
            len(array.shape) > len(shape)
            or array.shape[-1:] != shape[-1:]
            or leading != tuple(shape[: len(leading)])
        ):
            raise KernelInputError(
                f"x {list(shape)} needs {name} with the shape of leading axes of x and the last axis, like "
                f"{[*shape[:1], shape[-1]]}, got {list(array.shape)}"
            )
        samples[name] = math.prod(leading)
    if len(set(samples.values())) > 1:
        shapes = " and ".join(str(list(array.shape)) for array in modulations.values())
        raise KernelInputError(f"{' and '.join(modulations)} must have one shape, got {shapes}")
    return samples.popitem()[1]
