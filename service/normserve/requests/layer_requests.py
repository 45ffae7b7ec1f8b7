"""Loading of a layer from its query and payload, and the description of a registered layer."""

from typing import Any

from normserve.codec import safetensors
from normserve.engine.engine import Engine
from normserve.errors import InvalidParameterError
from normserve.jobs.job import LAYER_OPS, LAYER_OPTIONS, NormSpec, Op, PassDirection, RegisteredLayer
from normserve.jobs.validation import check_group_count, check_layer_parameters
from normserve.layers.registry import LayerRegistry
from normserve.requests.request_parameters import LAYER_PARAMETERS, make_spec, parse_query


def require_valid_layer_query(query: bytes) -> None:
    """Raise an error if a query string does not describe a layer.

    Raises:
        InvalidParameterError: it does not.
    """
    _parse_spec(query)


async def load_layer_onto_device(
    engine: Engine, layers: LayerRegistry, name: str, query: bytes, body: memoryview
) -> RegisteredLayer:
    """Load a layer's weight and bias from a safetensors body onto the device, and return the layer.  The
    caller registers it.

    Args: query: the layer's operation and options.

    Raises:
        TooLargeError: `layers` is full.
        NormserveError: the query or the body is invalid, or the device failed.
    """
    spec = _parse_spec(query)
    weight, bias = check_layer_parameters(spec.op, safetensors.decode(body))
    if spec.num_groups:
        check_group_count(spec.num_groups, weight.shape[0])
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    with layers.reserve(name, nbytes):
        resident = await engine.load_parameters(spec.op, weight, bias)
    return RegisteredLayer(
        name=name,
        spec=spec,
        size=weight.shape[-1],
        dtype=weight.dtype,
        has_bias=bias is not None,
        nbytes=nbytes,
        backend_parameters=resident,
        heads=weight.shape[0] if len(weight.shape) == 2 else 0,
    )


def describe_layer(layer: RegisteredLayer) -> dict[str, Any]:
    """Return a registered layer's operation, options and shape as a JSON object."""
    options = {
        option.name: getattr(layer.spec, option.name)
        for option in LAYER_OPTIONS
        if layer.op in option.request_parameters
    }
    described: dict[str, Any] = {
        "name": layer.name,
        "op": layer.op.value,
        **options,
        "size": layer.size,
        "dtype": layer.dtype.value,
        "bias": layer.has_bias,
    }
    return described | {"heads": layer.heads} if layer.heads else described


def _parse_spec(query: bytes) -> NormSpec:
    """Parse a layer's operation and options from a query string; raise an error if they do not fit one another."""
    values = parse_query(query, LAYER_PARAMETERS)
    if "op" not in values:
        raise InvalidParameterError("op must be given: " + ", ".join(op.value for op in LAYER_OPS))
    op = Op(values["op"])
    if (op is Op.GROUP_NORM) != ("num_groups" in values):
        raise InvalidParameterError("num_groups must be given for group_norm, and for nothing else")
    for option in LAYER_OPTIONS:
        if option.name in values and op not in option.request_parameters:
            takers = " or ".join([each.value for each in LAYER_OPS if each in option.request_parameters])
            raise InvalidParameterError(f"{option.name} must be given for {takers} alone")
    return make_spec(op, PassDirection.FORWARD, values)
