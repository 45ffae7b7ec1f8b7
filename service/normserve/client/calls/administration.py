"""Calls for registered layers and for the server itself, in the form of `operations`."""

from typing import Any, Literal
from urllib.parse import quote

from normserve.client.calls.api_call import ApiCall, describe_tensors, make_query
from normserve.client.calls.array_conversion import TensorLike
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import LIST_BYTES
from normserve.codec.api_names import PARAMETERS, ActivationName


def put_layer(
    name: str,
    op: Literal["layer_norm", "rms_norm", "group_norm"],
    weight: TensorLike,
    bias: TensorLike | None = None,
    *,
    eps: float | None = None,
    num_groups: int | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    weight_offset: float | None = None,
) -> ApiCall[bool]:
    """Register parameters under a name, or replace that layer.

    The parameters stay on the server's device.  The method of `AsyncClient` is a coroutine with these arguments,
    to be awaited.

    Args:
        name: one to 128 of the characters A-Z a-z 0-9 . _ - and neither "." nor "..".
        op: "layer_norm", "rms_norm" or "group_norm".
        weight: [N], or [H, N] for a separate weight per head; [C] for group_norm: an array of any library (on a
            CPU or a GPU) or a `HostTensor`, float32, float16 or bfloat16.
        bias: of weight's shape, any of these dtypes; None (default) for zeros; not for rms_norm.
        eps: added to the variance; None (default) for 1e-5, for rms_norm 1e-6.
        num_groups: for group_norm, which requires it: divides C.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        weight_offset: 0 (default), or 1 for a weight that is stored around zero; not for group_norm.

    Returns:
        bool: True if the layer is new, False if it replaced one.

    Raises:
        TypeError: weight or bias is not a tensor, or has another dtype.
        InvalidRequestError: the server refuses the name, a shape or an option.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     is_new = client.put_layer("ln_f", "layer_norm", np.ones(1024, np.float32), eps=1e-6)
        ...     y = client.layer_norm(np.zeros((8, 1024), np.float32), layer="ln_f").y
    """
    arguments = dict(locals())
    del arguments["name"]
    tensors = describe_tensors({each: arguments.pop(each) for each in PARAMETERS})
    return ApiCall("PUT", _make_layer_path(name), _is_created, make_query(arguments), tensors, statuses=(200, 201))


def layers() -> ApiCall[list[dict[str, Any]]]:
    """Return a description of every registered layer.

    The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Returns:
        list[dict]: per layer, its name, op, eps, activation, size and dtype of its parameters, and further
            settings of its operation.

    Raises:
        ClientError: the server refuses the request or does not respond, after all retries.

    Examples:
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     names = [layer["name"] for layer in client.layers()]
    """
    return ApiCall("GET", "/v1/layers", _read_layers, max_bytes=LIST_BYTES)


def layer(name: str) -> ApiCall[dict[str, Any]]:
    """Return the description of one registered layer.

    The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Args:
        name: the name under which the layer was registered.

    Returns:
        dict: its name, op, eps, activation, size and dtype of its parameters, and further settings of its
            operation.

    Raises:
        UnknownLayerError: no layer of that name is registered.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     is_new = client.put_layer("ln_f", "layer_norm", np.ones(1024, np.float32), eps=1e-6)
        ...     size = client.layer("ln_f")["size"]
        >>> size
        1024
    """
    return ApiCall("GET", _make_layer_path(name), ApiResponse.parse_object)


def delete_layer(name: str) -> ApiCall[None]:
    """Remove a registered layer.

    The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Args:
        name: the name under which the layer was registered.

    Raises:
        UnknownLayerError: no layer of that name is registered.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     is_new = client.put_layer("ln_f", "layer_norm", np.ones(1024, np.float32), eps=1e-6)
        ...     client.delete_layer("ln_f")
    """
    return ApiCall("DELETE", _make_layer_path(name), _read_none, statuses=(204,))


def info() -> ApiCall[dict[str, Any]]:
    """Return the server's versions, backend, device, limits and measured copy bandwidth.

    The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Returns:
        dict: among others "version", "backend", "device", "limits", "operations", "dtypes" and
            "copy_bandwidth_bytes_per_second".

    Raises:
        ClientError: the server refuses the request or does not respond, after all retries.

    Examples:
        >>> from normserve.client import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     backend = client.info()["backend"]
    """
    return ApiCall("GET", "/v1/info", ApiResponse.parse_object)


def _make_layer_path(name: str) -> str:
    return f"/v1/layers/{quote(name, safe='')}"


def _is_created(answer: ApiResponse) -> bool:
    return answer.status == 201


def _read_layers(answer: ApiResponse) -> list[dict[str, Any]]:
    """Return the list of layer descriptions in a response.

    Raises:
        UnexpectedAnswerError: the response is no object with a list of objects in `layers`.
    """
    found = answer.parse_object().get("layers")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UnexpectedAnswerError("the answer must hold a list of layers, it does not")
    return found


def _read_none(_answer: ApiResponse) -> None:
    return None
