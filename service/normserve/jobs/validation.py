"""The input contract of a job: which tensors, of which shapes and types, an operation takes."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from normserve.codec.api_names import (
    CHAIN_PARAMETERS,
    COMPANIONS,
    OF_SAMPLES,
    PARAMETERS,
    STATISTICS,
    count_norms,
    is_parameter,
)
from normserve.errors import (
    InvalidParameterError,
    InvalidShapeError,
    MissingTensorError,
    UnexpectedTensorError,
    UnsupportedDtypeError,
)
from normserve.errors.name_suggestions import find_closest_tensor_name
from normserve.jobs.job import LAYER_OPTIONS, ChannelLayout, NormJob, NormSpec, Op, PassDirection, RegisteredLayer
from normserve.jobs.memory_cost import MemoryCost, estimate_memory_cost
from normserve.jobs.result_specs import Described, compute_statistics_shape
from normserve.memory.tensors import DType, HostTensor

MAX_HEADS = 65535
"""The largest number of heads with parameters of their own that the kernels take."""

MAX_COLS_OF_HEADS = 8192
"""The longest rows of x in a backward pass with parameters for each head: its kernels hold a row at once."""


def make_validated_job(
    spec: NormSpec,
    tensors: Mapping[str, HostTensor],
    layer: RegisteredLayer | None = None,
    *,
    may_overwrite: bool = False,
) -> tuple[NormJob, MemoryCost]:
    """Check that tensors, spec and layer fit one another; return the job, and the host memory that it needs.

    Args: may_overwrite: the tensors' memory is the job's own.

    Raises:
        InvalidRequestError: by the mismatch; the detail has the expected and the received value.
    """
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    spec, cost = _merge_layer_options_and_validate(spec, layer, described)
    return NormJob(spec, dict(tensors), layer, may_overwrite), cost


def _merge_layer_options_and_validate(
    spec: NormSpec, layer: RegisteredLayer | None, tensors: Described
) -> tuple[NormSpec, MemoryCost]:
    """Check that spec, layer and tensors fit one another; return the spec with the layer's options, and
    the memory cost.
    """
    if layer is not None:
        spec = _merge_layer_options(spec, layer)
    _check_tensor_names(spec, tensors, parameters_in_layer=layer is not None)
    _, x_shape = tensors["x"]
    size = _check_x(spec, layer, tensors)
    if layer is not None and layer.size != size:
        hint = _suggest_layout(spec, layer.size, x_shape)
        raise InvalidShapeError(f"layer {layer.name!r} is for size {layer.size}, x has {size}{hint}")
    for name in COMPANIONS:
        _check_shape(name, tensors, x_shape)
    if "gate" in tensors and "residual" not in tensors:
        raise MissingTensorError("gate needs a residual, to which gate * x is added; none was sent")
    if spec.is_over_channels and spec.out_dtype is DType.FLOAT8_E4M3FN:
        raise InvalidParameterError(
            "out_dtype float8_e4m3fn needs layout=nhwc, with channels last; got layout=nchw"
        )
    heads = layer.heads if layer is not None else _count_heads(spec.op, tensors)
    if heads:
        _check_heads(spec, heads, x_shape)
    for name in filter(is_parameter, tensors):
        _check_parameter(spec, name, tensors[name][1], x_shape, x_shape[-2:] if heads else (size,))
    if spec.weight_offset and layer is None and "weight" not in tensors:
        raise MissingTensorError("weight_offset needs a weight, none was sent")
    modulations = {name: tensors[name][1] for name in OF_SAMPLES if name in tensors}
    if spec.layout is not None:
        for name, shape in modulations.items():
            if shape != (x_shape[0], size):
                hint = _suggest_layout_of_samples(spec, shape, x_shape)
                raise InvalidShapeError(f"{name} must be {[x_shape[0], size]}, got {list(shape)}{hint}")
    elif modulations:
        _check_row_modulations(spec, heads, modulations, x_shape)
    for name in ("mean", "rstd"):
        _check_statistics(name, tensors, spec, x_shape)
    return spec, estimate_memory_cost(spec, tensors, layer)


def list_accepted_tensor_names(
    op: Op, direction: PassDirection, *, parameters_in_layer: bool = False
) -> tuple[str, ...]:
    """List the tensors that a request for an operation may have; with a registered layer, without weight
    and bias.
    """
    if op is Op.LAYER_NORM_CHAIN:
        return ("x",) if parameters_in_layer else ("x", *CHAIN_PARAMETERS)
    rms = op is Op.RMS_NORM
    parameters = () if parameters_in_layer else PARAMETERS[:1] if rms else PARAMETERS
    of_samples = [name for name in OF_SAMPLES if name != "gate" or op is not Op.GROUP_NORM]
    names = ("x", *parameters, *of_samples, "residual")
    if direction is PassDirection.FORWARD:
        return names
    return (*names, "dy", *(STATISTICS[1:] if rms else STATISTICS), "dresidual_out")


def check_layer_parameters(op: Op, tensors: Mapping[str, HostTensor]) -> tuple[HostTensor, HostTensor | None]:
    """Check the tensors of a layer that is about to be registered; return its weight, and its bias or None.

    Raises:
        InvalidRequestError: they do not fit a layer of this operation.
    """
    accepted_names = ("weight",) if op is Op.RMS_NORM else ("weight", "bias")
    _check_accepted(tensors, accepted_names, f"a layer of {op.value}")
    if "weight" not in tensors:
        raise MissingTensorError("a layer must have a weight, none was sent")
    weight, bias = tensors["weight"], tensors.get("bias")
    ranks = (1,) if op is Op.GROUP_NORM else (1, 2)
    if len(weight.shape) not in ranks or min(weight.shape) < 1:
        forms = "[N] with N >= 1" if op is Op.GROUP_NORM else "[N] or [H, N] with H and N >= 1"
        raise InvalidShapeError(f"weight must be {forms}, got {list(weight.shape)}")
    if len(weight.shape) == 2:
        _check_head_count(weight.shape[0])
    if bias is not None:
        _check_shape("bias", {"bias": (bias.dtype, bias.shape)}, weight.shape)
    return weight, bias


def check_group_count(num_groups: int, channels: int) -> None:
    """Refuse a number of groups that does not divide the channels.

    Raises:
        InvalidParameterError: num_groups does not divide the channels.
    """
    if channels % num_groups:
        raise _make_group_count_error(num_groups, channels)


def _make_group_count_error(num_groups: int, channels: int, hint: str = "") -> InvalidParameterError:
    return InvalidParameterError(f"num_groups must divide the {channels} channels, got {num_groups}{hint}")


def _merge_layer_options(spec: NormSpec, layer: RegisteredLayer) -> NormSpec:
    if layer.spec.op is not spec.op:
        raise InvalidParameterError(f"layer {layer.name!r} is of {layer.spec.op.value}, not of {spec.op.value}")
    return replace(spec, **{option.name: getattr(layer.spec, option.name) for option in LAYER_OPTIONS})


def _check_tensor_names(spec: NormSpec, tensors: Described, *, parameters_in_layer: bool) -> None:
    """Refuse a request with tensors that the operation does not take, or without tensors that it needs."""
    backward = spec.direction is PassDirection.BACKWARD
    accepted_names = list_accepted_tensor_names(spec.op, spec.direction, parameters_in_layer=parameters_in_layer)
    beside = " with a registered layer" if parameters_in_layer else ""
    _check_accepted(tensors, accepted_names, f"{spec.op.value} {spec.direction.value}{beside}")
    for name in ("x", "dy") if backward else ("x",):
        if name not in tensors:
            raise MissingTensorError(f"{spec.op.value} {spec.direction.value} needs {name!r}, it did not come")
    if spec.op is Op.LAYER_NORM_CHAIN and not parameters_in_layer and not count_norms(tensors):
        raise MissingTensorError("layer_norm_chain needs weight.0 or another parameter of a norm, none was sent")
    if backward and spec.op is not Op.RMS_NORM and ("mean" in tensors) != ("rstd" in tensors):
        raise MissingTensorError("mean and rstd must be sent together or not at all")


def _check_accepted(tensors: Collection[str], accepted_names: tuple[str, ...], what: str) -> None:
    for name in tensors:
        if name not in accepted_names:
            closest = find_closest_tensor_name(name, [each for each in accepted_names if each not in tensors])
            hint = f"; the closest is {closest!r}" if closest else ""
            raise UnexpectedTensorError(f"{what} takes {', '.join(accepted_names)}, got {name[:64]!r}{hint}")


def _check_x(spec: NormSpec, layer: RegisteredLayer | None, tensors: Described) -> int:
    """Check rank and sizes of x.  Return the length that the operation's parameters must have: N, or samples' C."""
    _, shape = tensors["x"]
    if spec.layout is None:
        if not shape or shape[-1] < 1:
            raise InvalidShapeError(f"x must be [..., N] with N >= 1, got {list(shape)}")
        return shape[-1]
    last = spec.layout is ChannelLayout.NHWC
    form = "[B, *spatial, C]" if last else "[B, C, *spatial]"
    if len(shape) < 2 or 0 in shape[1:]:
        raise InvalidShapeError(
            f"with layout={spec.layout.value} x must be {form} with no empty axis but B, got {list(shape)}"
        )
    channels = shape[-1] if last else shape[1]
    if spec.op is Op.GROUP_NORM and channels % spec.num_groups:
        hint = _suggest_layout_of_groups(spec, layer, tensors)
        raise _make_group_count_error(spec.num_groups, channels, hint)
    return channels


def _count_heads(op: Op, tensors: Described) -> int:
    """Return H if the request's weight or bias is [H, N], with parameters for each head; else 0."""
    if op is not Op.GROUP_NORM:
        for name in ("weight", "bias"):
            if name in tensors and len(tensors[name][1]) == 2:
                return tensors[name][1][0]
    return 0


def _check_heads(spec: NormSpec, heads: int, x_shape: tuple[int, ...]) -> None:
    """Check that x has as many heads as the parameters, and that the operation supports parameters for
    each head.
    """
    if spec.layout is not None:
        raise InvalidShapeError("parameters of each head need layout=nhwc, with channels last; got layout=nchw")
    if len(x_shape) < 2 or x_shape[-2] != heads:
        raise InvalidShapeError(f"x must be [..., {heads}, N], as parameters of each head are, got {list(x_shape)}")
    _check_head_count(heads)
    if spec.out_dtype is DType.FLOAT8_E4M3FN:
        raise InvalidParameterError("out_dtype float8_e4m3fn needs weight and bias [N], got those of each head")
    if spec.direction is PassDirection.BACKWARD and x_shape[-1] > MAX_COLS_OF_HEADS:
        raise InvalidShapeError(
            f"gradients of parameters of each head need N of at most {MAX_COLS_OF_HEADS}, got {x_shape[-1]}"
        )


def _check_head_count(heads: int) -> None:
    if heads > MAX_HEADS:
        raise InvalidShapeError(f"parameters may be of at most {MAX_HEADS} heads, got {heads}")


def _check_row_modulations(
    spec: NormSpec, heads: int, modulations: Mapping[str, tuple[int, ...]], x_shape: tuple[int, ...]
) -> None:
    """Check the shapes of scale, shift and gate of rows, and that no parameters are of each head.

    Args:
        heads: the number of heads with parameters of their own, or 0.
        modulations: the shapes of those that were sent, at least one.
    """
    names = " and ".join(modulations)
    if heads:
        verb = "needs" if len(modulations) == 1 else "need"
        raise InvalidShapeError(f"{names} {verb} weight and bias [N], or none, got those of each head")
    counts = {_count_samples(spec, name, shape, x_shape) for name, shape in modulations.items()}
    if len(counts) > 1:
        shapes = " and ".join(str(list(shape)) for shape in modulations.values())
        raise InvalidShapeError(f"{names} must have rows for the same samples of x, got {shapes}")


def _count_samples(spec: NormSpec, name: str, shape: tuple[int, ...], x_shape: tuple[int, ...]) -> int:
    """Count the samples of scale, shift or gate, each of which has a row for consecutive rows of x [..., N].

    The shape is that of some leading axes of x and its last one, with axes of one element between or without.
    """
    leading = shape[:-1]
    while leading and leading[-1] == 1 and leading != x_shape[: len(leading)]:
        leading = leading[:-1]
    if len(shape) > len(x_shape) or shape[-1:] != x_shape[-1:] or leading != x_shape[: len(leading)]:
        *axes, cols = x_shape
        forms = [[*axes[:count], cols] for count in range(len(axes) + 1)]
        hint = _suggest_layout_of_samples(spec, shape, x_shape)
        raise InvalidShapeError(
            f"{name} of x {list(x_shape)} must be {_format_shapes(forms)}, got {list(shape)}{hint}"
        )
    return prod(leading)


def _format_shapes(shapes: list[list[int]]) -> str:
    """Format shapes as alternatives; of many, the first ones and the last."""
    *first, last = map(str, shapes if len(shapes) < 5 else [*shapes[:3], "...", shapes[-1]])
    return f"{', '.join(first)} or {last}" if first else last


def _check_shape(name: str, tensors: Described, shape: tuple[int, ...]) -> None:
    if name in tensors and tensors[name][1] != shape:
        raise InvalidShapeError(f"{name} must be {list(shape)}, got {list(tensors[name][1])}")


def _check_parameter(
    spec: NormSpec, name: str, got: tuple[int, ...], x_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Check a parameter's shape; the error names both tensors, as only the client knows which one is wrong."""
    if got != shape:
        hint = _suggest_layout(spec, got[0], x_shape) if len(got) == 1 else ""
        raise InvalidShapeError(f"x {list(x_shape)} needs {name} {list(shape)}, got {list(got)}{hint}")


def _suggest_layout(spec: NormSpec, size: int, x_shape: tuple[int, ...]) -> str:
    """Return the end of an error about a parameter's size, which names the layout in which it is that of x's
    channels; an empty text if there is none.
    """
    if spec.op is Op.LAYER_NORM_CHAIN or len(x_shape) < 3:
        return ""
    layout, channels = ("nhwc", x_shape[-1]) if spec.layout is ChannelLayout.NCHW else ("nchw", x_shape[1])
    return f"; with layout={layout} x has {size} channels" if channels == size else ""


def _suggest_layout_of_groups(spec: NormSpec, layer: RegisteredLayer | None, tensors: Described) -> str:
    """Return the end of an error about groups: as `_suggest_layout`, if the parameters are as long as the channels
    of the other layout, or if there are none and the groups divide those channels.
    """
    _, x_shape = tensors["x"]
    other = x_shape[1] if spec.layout is ChannelLayout.NHWC else x_shape[-1]
    sizes = {tensors[name][1][0] for name in PARAMETERS if name in tensors and len(tensors[name][1]) == 1}
    if layer is not None:
        sizes = {layer.size}
    fits = sizes == {other} if sizes else other % spec.num_groups == 0
    return _suggest_layout(spec, other, x_shape) if fits else ""


def _suggest_layout_of_samples(spec: NormSpec, shape: tuple[int, ...], x_shape: tuple[int, ...]) -> str:
    """Return the end of an error about the shape of scale, shift or gate: as `_suggest_layout` if it is [B, C]."""
    return _suggest_layout(spec, shape[1], x_shape) if len(shape) == 2 and shape[0] == x_shape[0] else ""


def _check_statistics(name: str, tensors: Described, spec: NormSpec, x_shape: tuple[int, ...]) -> None:
    """Check that mean or rstd, if it was sent, is float32, with a value for each row, position or group."""
    _check_shape(name, tensors, compute_statistics_shape(spec, x_shape))
    if name in tensors and tensors[name][0] is not DType.FLOAT32:
        raise UnsupportedDtypeError(f"{name} must be float32, got {tensors[name][0].value}")
