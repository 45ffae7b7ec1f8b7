"""A layer to be registered, from its query and payload, and the description of a registered layer."""

from typing import Any

from normserve.codec import safetensors
from normserve.engine.engine import Engine
from normserve.errors import InvalidParameterError
from normserve.jobs.job import LAYER_OPS, Layer, Op
from normserve.jobs.validation import check_group_count, check_parameters
from normserve.layers.registry import LayerRegistry
from normserve.requests.parameters import LAYER_PARAMETERS, default_eps, parse_query


def require_layer_query(query: bytes) -> None:
    """Raises: InvalidParameterError: no layer can be described so."""
    _operation(parse_query(query, LAYER_PARAMETERS))


async def make_layer(engine: Engine, layers: LayerRegistry, name: str, query: bytes, body: memoryview) -> Layer:
    """The layer that a query and a safetensors body describe, its parameters on the device; not registered yet.

    Raises:
        TooLargeError: `layers` is full.
        NormserveError: by what is wrong with them, or with the device.
    """
    values = parse_query(query, LAYER_PARAMETERS)
    op = _operation(values)
    weight, bias = check_parameters(op, safetensors.decode(body))
    num_groups = values.get("num_groups", 0)
    if num_groups:
        check_group_count(num_groups, weight.shape[0])
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    with layers.expecting(name, nbytes):
        resident = await engine.load(op, weight, bias)
    return Layer(
        name=name,
        op=op,
        eps=values.get("eps", default_eps(op)),
        num_groups=num_groups,
        activation=values.get("activation", "none"),
        size=weight.shape[-1],
        dtype=weight.dtype,
        has_bias=bias is not None,
        nbytes=nbytes,
        resident=resident,
        weight_offset=values.get("weight_offset", 0.0),
        heads=weight.shape[0] if len(weight.shape) == 2 else 0,
    )


def layer_document(layer: Layer) -> dict[str, Any]:
    """A registered layer as JSON tells of it."""
    described: dict[str, Any] = {
        "name": layer.name,
        "op": layer.op.value,
        "eps": layer.eps,
        "activation": layer.activation,
        "size": layer.size,
        "dtype": layer.dtype.value,
        "bias": layer.has_bias,
    }
    if layer.op is Op.GROUP_NORM:
        return described | {"num_groups": layer.num_groups}
    described["weight_offset"] = layer.weight_offset
    return described | {"heads": layer.heads} if layer.heads else described


def _operation(values: dict[str, Any]) -> Op:
    if "op" not in values:
        raise InvalidParameterError("op must be given: " + ", ".join(op.value for op in LAYER_OPS))
    op = Op(values["op"])
    if (op is Op.GROUP_NORM) != ("num_groups" in values):
        raise InvalidParameterError("num_groups must be given for group_norm, and for nothing else")
    if op is Op.GROUP_NORM and "weight_offset" in values:
        raise InvalidParameterError("weight_offset must be given for layer_norm or rms_norm alone")
    return op
