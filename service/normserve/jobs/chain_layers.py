"""Several registered layers as one layer of the chain operation."""

from collections.abc import Sequence
from dataclasses import dataclass

from normserve.codec.api_names import MAX_NORMS
from normserve.errors import InvalidParameterError
from normserve.jobs.job import LAYER_OPTIONS, NormSpec, Op, PassDirection, RegisteredLayer

# Options that layers of layer_norm may have, and chains of them do not.
_OF_LAYERS_ALONE = [
    option.name
    for option in LAYER_OPTIONS
    if Op.LAYER_NORM in option.request_parameters and Op.LAYER_NORM_CHAIN not in option.request_parameters
]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ChainParameters:
    """The parameters of a chain's layers in the backend's own form, one entry for each layer in their order."""

    layer_parameters: tuple[object, ...]


def make_chain_layer(layers: Sequence[RegisteredLayer]) -> RegisteredLayer:
    """Combine several registered LayerNorms into one layer of the chain operation, which applies them in
    this order.

    Args: layers: 1 to `MAX_NORMS`.

    Raises:
        InvalidParameterError: one is no plain LayerNorm, or of another size or eps than the first.
    """
    if len(layers) > MAX_NORMS:
        raise InvalidParameterError(f"layers must name 1 to {MAX_NORMS} layers, got {len(layers)}")
    first = layers[0]
    for layer in layers:
        if layer.op is not Op.LAYER_NORM:
            raise InvalidParameterError(f"layer {layer.name!r} is of {layer.op.value}, a chain is of layer_norm")
        eps = layer.spec.eps
        if layer.heads or layer.spec != NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps):
            names = ", ".join(["heads", *_OF_LAYERS_ALONE])
            raise InvalidParameterError(f"layer {layer.name!r} has one of {names}, which no norm of a chain has")
        if (layer.size, eps) != (first.size, first.spec.eps):
            raise InvalidParameterError(
                f"layers of a chain must be of one size and eps: {first.name!r} has {first.size} and "
                f"{first.spec.eps:g}, {layer.name!r} has {layer.size} and {eps:g}"
            )
    return RegisteredLayer(
        name=",".join([layer.name for layer in layers]),
        spec=NormSpec(Op.LAYER_NORM_CHAIN, PassDirection.FORWARD, first.spec.eps),
        size=first.size,
        dtype=first.dtype,
        has_bias=any(layer.has_bias for layer in layers),
        nbytes=sum([layer.nbytes for layer in layers]),
        backend_parameters=ChainParameters(tuple([layer.backend_parameters for layer in layers])),
        parameter_types=tuple([(layer.dtype, layer.has_bias) for layer in layers]),
    )
