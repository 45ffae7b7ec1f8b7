"""A request's parameters: the options of its call, the layer that it names, and its timeout."""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from normserve.codec.api_names import DEFAULT_SLOPE, MAX_NORMS
from normserve.errors import InvalidParameterError
from normserve.errors.name_suggestions import suggest_name
from normserve.jobs.job import LAYER_OPS, LAYER_OPTIONS, NormSpec, Op, PassDirection, list_options
from normserve.jobs.option_values import RequestParameter, make_choice_parameter, parse_number
from normserve.layers.registry import LAYER_NAMES, is_layer_name

_DEFAULT_EPS = {Op.LAYER_NORM: 1e-5, Op.RMS_NORM: 1e-6, Op.GROUP_NORM: 1e-5, Op.LAYER_NORM_CHAIN: 1e-5}
_MAX_FIELDS = 64
# Longest part of a name that an error repeats.
_MAX_NAMED = 64


def _parse_timeout_ms(text: str) -> float:
    """Parse a timeout in milliseconds; raise ValueError unless it is above 0 and at most a day."""
    value = parse_number(text)
    if not 0 < value <= 86_400_000:
        raise ValueError("milliseconds above 0, a day at most")
    return value


def _validate_layer_name(text: str) -> str:
    """Return the text unchanged; raise ValueError if it is no valid name of a registered layer."""
    if not is_layer_name(text):
        raise ValueError(LAYER_NAMES)
    return text


def _validate_layer_names(text: str) -> str:
    """Check a chain's layer names, which are joined by commas, and return the text unchanged.  Raise ValueError if
    a name is invalid or there are too many.
    """
    names = text.split(",")
    if len(names) > MAX_NORMS or not all(map(is_layer_name, names)):
        raise ValueError(f"1 to {MAX_NORMS} names of layers, joined by commas, each {LAYER_NAMES}")
    return text


_OP = make_choice_parameter("The operation.", [op.value for op in LAYER_OPS])
_LAYER = RequestParameter(
    "A registered layer in place of the parameters.", _validate_layer_name, {"type": "string"}
)
_LAYERS = RequestParameter(
    "Registered layers of layer_norm in place of the parameters, in their order, joined by commas.",
    _validate_layer_names,
    {"type": "string"},
)
_TIMEOUT = RequestParameter(
    "From arrival to the start of execution, at most.", _parse_timeout_ms, {"type": "number"}
)

Parameters = Mapping[str, RequestParameter]
"""The accepted parameters, by name."""

LAYER_PARAMETERS: Parameters = {"op": _OP} | {
    option.name: next(iter(option.request_parameters.values())) for option in LAYER_OPTIONS
}


@functools.cache
def list_operation_parameters(op: Op, direction: PassDirection) -> Parameters:
    """Return the query parameters that an operation accepts in this pass, by name: its options, a layer and
    a timeout.
    """
    layer = {"layers": _LAYERS} if op is Op.LAYER_NORM_CHAIN else {"layer": _LAYER}
    options = {option.name: option.request_parameters[op] for option in list_options(op, direction)}
    return {**options, **layer, "timeout_ms": _TIMEOUT}


def make_openapi_parameters(parameters: Parameters, required: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the OpenAPI description of these query parameters.

    Args: required: names of those that every request must have; none by default.
    """
    return [
        {"name": name, "in": "query", "required": name in required, "description": each.doc, "schema": each.schema}
        for name, each in parameters.items()
    ]


def parse_query(raw: bytes, parameters: Parameters) -> dict[str, Any]:
    """Parse a query string into values by parameter name; only the given `parameters` are accepted.

    Raises:
        InvalidParameterError: a name is unknown or repeated, or a value is invalid.
    """
    return parse_parameters(_split_query(raw), parameters)


def parse_parameters(pairs: Iterable[tuple[str, str]], parameters: Parameters) -> dict[str, Any]:
    """Parse pairs of a parameter's name and text into values by name; only the given `parameters` are accepted.

    Raises:
        InvalidParameterError: a name is unknown or repeated, or a value is invalid.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        parameter = parameters.get(name)
        if parameter is None:
            raise InvalidParameterError(_describe_unknown_name(name, parameters))
        if name in values:
            raise InvalidParameterError(f"{name} must be given once, got it again")
        try:
            values[name] = parameter.parse(text)
        except ValueError as error:
            raise InvalidParameterError(f"{name} must be {error}, got {text[:64]!r}") from None
    return values


def _split_query(raw: bytes) -> list[tuple[str, str]]:
    """Split a query string into pairs of name and text; raise InvalidParameterError if it is malformed or
    has too many pairs.
    """
    if not raw:
        return []
    try:
        return parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidParameterError(f"the query must be at most {_MAX_FIELDS} name=value pairs in UTF-8") from None


def _describe_unknown_name(name: str, known_names: Collection[str]) -> str:
    """Return the error message for an unknown parameter, with the closest known name."""
    return f"{name[:_MAX_NAMED]!r} is not a parameter of this operation; {suggest_name(name, known_names)}"


def suggest_operation(name: str) -> str:
    """Format the end of an error about an unknown operation: which one InstanceNorm is; "" for another name."""
    is_instance_norm = name in ("instance_norm", "instance_norm_backward")
    return "; instance_norm is group_norm with num_groups equal to the channels" if is_instance_norm else ""


def make_spec(op: Op, direction: PassDirection, values: dict[str, Any]) -> NormSpec:
    """Make an operation's `NormSpec` from parsed parameters and defaults.  If they name a registered layer,
    the layer's own options are added later.

    Raises:
        InvalidParameterError: parameters contradict one another, or one is missing.
    """
    if find_layer_name(values) is not None:
        given = [option.name for option in LAYER_OPTIONS if option.name in values]
        if given:
            raise InvalidParameterError(f"{given[0]} belongs to the layer and must not be given with layer")
    elif op is Op.GROUP_NORM and "num_groups" not in values:
        raise InvalidParameterError("num_groups must be given")
    if values.get("dropout") and "seed" not in values:
        raise InvalidParameterError("seed must be given with dropout")
    options = {option.name: values[option.name] for option in list_options(op, direction) if option.name in values}
    activation = options.get("activation", "none")
    if options.get("negative_slope", DEFAULT_SLOPE) != DEFAULT_SLOPE and activation != "leaky_relu":
        raise InvalidParameterError(f"negative_slope needs activation leaky_relu, got {activation!r}")
    return NormSpec(op, direction, **{"eps": _DEFAULT_EPS[op], **options})


def find_layer_name(values: dict[str, Any]) -> str | None:
    """Return the registered layer that parsed parameters name, or a chain's layers joined by commas; None if
    they name none.
    """
    return values.get("layers") or values.get("layer")
