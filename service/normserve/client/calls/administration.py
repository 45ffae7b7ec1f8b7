"""Calls for registered layers and for the server itself, in the form of `operations`."""

from typing import Any, Literal
from urllib.parse import quote

from normserve.client.answers.answer import ApiResponse
from normserve.client.answers.reception import LIST_BYTES
from normserve.client.calls.arrays import TensorLike
from normserve.client.calls.call import ApiCall, describe_tensors, make_query
from normserve.client.errors import UnexpectedAnswerError
from normserve.codec.activations import ActivationName
from normserve.codec.tensor_names import PARAMETERS


def put_layer(
    name: str,
    op: Literal["layer_norm", "rms_norm", "group_norm"],
    weight: TensorLike,
    bias: TensorLike | None = None,
    *,
    eps: float | None = None,
    num_groups: int | None = None,
    activation: ActivationName | None = None,
    weight_offset: float | None = None,
) -> ApiCall[bool]:
    """Register parameters under a name, or replace that layer; the parameters stay on the server's device.

    Args:
        name: one to 128 of the characters A-Z a-z 0-9 . _ -
        op: "layer_norm", "rms_norm" or "group_norm".
        weight, bias: [N], or [H, N] where each head has its own; [C] of group_norm.
        eps, num_groups, activation, weight_offset: as in the operation; a request with the layer's name has none.

    Returns:
        True when the layer is new, False when it replaced one.
    """
    arguments = dict(locals())
    del arguments["name"]
    tensors = describe_tensors({each: arguments.pop(each) for each in PARAMETERS})
    return ApiCall("PUT", _make_layer_path(name), _is_created, make_query(arguments), tensors, statuses=(200, 201))


def layers() -> ApiCall[list[dict[str, Any]]]:
    """Return a description of every registered layer."""
    return ApiCall("GET", "/v1/layers", _read_layers, max_bytes=LIST_BYTES)


def layer(name: str) -> ApiCall[dict[str, Any]]:
    """Return the description of one registered layer.

    Raises:
        UnknownLayerError: there is none of that name.
    """
    return ApiCall("GET", _make_layer_path(name), ApiResponse.parse_object)


def delete_layer(name: str) -> ApiCall[None]:
    """Remove a registered layer.

    Raises:
        UnknownLayerError: there is none of that name.
    """
    return ApiCall("DELETE", _make_layer_path(name), _read_none, statuses=(204,))


def info() -> ApiCall[dict[str, Any]]:
    """Return the server's versions, backend, device, limits and measured copy bandwidth."""
    return ApiCall("GET", "/v1/info", ApiResponse.parse_object)


def _make_layer_path(name: str) -> str:
    return f"/v1/layers/{quote(name, safe='')}"


def _is_created(answer: ApiResponse) -> bool:
    return answer.status == 201


def _read_layers(answer: ApiResponse) -> list[dict[str, Any]]:
    found = answer.parse_object().get("layers")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UnexpectedAnswerError("the answer must hold a list of layers, it does not")
    return found


def _read_none(_answer: ApiResponse) -> None:
    return None
