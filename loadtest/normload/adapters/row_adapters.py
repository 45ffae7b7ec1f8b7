"""Servers that hold the parameters and normalise rows: x is the request, and y is the response.

They support only LayerNorm, forward, with weight and bias.  The server holds these, so a server for a comparison
must be started with `make_parameters(case)`.
"""

import json
from collections.abc import Mapping

import numpy as np
from normserve.client import HostTensor, UnexpectedAnswerError
from normserve.client.responses.api_errors import parse_strict_json
from normserve.client.responses.api_response import ApiResponse
from normserve.codec import npy
from normserve.codec.shapes import MAX_RANK
from normserve.errors import NormserveError
from normserve.memory.tensors import DType
from numpy.typing import NDArray

from normload.adapters import AdapterRequest
from normload.load.element_types import to_float64
from normload.load.request_cases import RequestCase

_NPY = "application/x-npy"
_LENGTH_HEADER = "Inference-Header-Content-Length"
# Limit of the header before the data, which has some hundred bytes.
_HEADER_BYTES = 2**16
_DATATYPES = {DType.FLOAT32: "FP32", DType.FLOAT16: "FP16"}


def find_unsupported_reason(case: RequestCase) -> str | None:
    """Return why a server that can compute only LayerNorm of x does not support the case; None if it supports it.
    The text names the server's limits.
    """
    if case.operation != "layer_norm" or case.make_nondefault_client_options() or case.residual or case.adaptive:
        return "only layer_norm forward, without residual, scale, shift, activation and other options"
    if case.heads or case.parts:
        return "only one x, weight and bias of one vector each"
    if not case.affine or case.dtype not in _DATATYPES:
        return "only float32 and float16, with weight and bias"
    return None


def make_parameters(case: RequestCase) -> dict[str, NDArray[np.float32]]:
    """Make the weight and the bias that such a server must hold."""
    tensors = case.make_tensors()
    return {name: to_float64(tensors[name]).astype(np.float32) for name in ("weight", "bias")}


class NpyAdapter:
    """The protocol of a server that receives x as npy at its URL, and responds with y as npy."""

    def find_unsupported_reason(self, case: RequestCase) -> str | None:
        """Describe the limits of all such servers."""
        return find_unsupported_reason(case)

    def make_request(self, case: RequestCase, tensors: Mapping[str, HostTensor]) -> AdapterRequest:
        """Make a request with x alone."""
        x = tensors["x"]
        return AdapterRequest("POST", "", npy.encode(x), x.nbytes + _HEADER_BYTES, {"Content-Type": _NPY})

    def parse_tensors(self, case: RequestCase, answer: ApiResponse) -> dict[str, HostTensor]:
        """Return y, a view of the response's body, which must be npy.

        Raises:
            UnexpectedAnswerError: the body is not npy.
        """
        try:
            return {"y": npy.decode(answer.body)}
        except NormserveError as error:
            raise UnexpectedAnswerError(f"the answer is not npy: {error.detail}") from error


class KServeAdapter:
    """Version 2 of KServe's inference protocol, with the tensors' bytes after the JSON (Triton's extension).

    Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
    """

    def find_unsupported_reason(self, case: RequestCase) -> str | None:
        """Describe the limits of all such servers."""
        return find_unsupported_reason(case)

    def make_request(self, case: RequestCase, tensors: Mapping[str, HostTensor]) -> AdapterRequest:
        """Make an inference request to the model in the server's URL, with x as its only input.  The server
        holds weight and bias.
        """
        x = tensors["x"]
        given = {
            "name": "x",
            "shape": x.shape,
            "datatype": _DATATYPES[x.dtype],
            "parameters": {"binary_data_size": x.nbytes},
        }
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        head = json.dumps({"inputs": [given], "outputs": outputs}).encode()
        headers = {"Content-Type": "application/octet-stream", _LENGTH_HEADER: str(len(head))}
        return AdapterRequest("POST", "/infer", (head, x.data), x.nbytes + _HEADER_BYTES, headers)

    def parse_tensors(self, case: RequestCase, answer: ApiResponse) -> dict[str, HostTensor]:
        """Return y, a view of the bytes after the response's JSON.

        Raises:
            UnexpectedAnswerError: the response has another form, or fewer or more bytes than y's shape.
        """
        try:
            length = int(answer.headers[_LENGTH_HEADER.lower()][:18])
            data = answer.body[max(0, length) :]
            (output,) = parse_strict_json(bytes(answer.body[: max(0, length)]))["outputs"]
            dtype = {name: dtype for dtype, name in _DATATYPES.items()}[output["datatype"]]
            tensor = HostTensor(dtype, _parse_shape(output["shape"]), data)
        # Their messages would repeat the server's data.
        except (KeyError, ValueError, TypeError):
            raise UnexpectedAnswerError("the answer is not one of KServe's with binary tensors") from None
        if tensor.nbytes != data.nbytes:
            raise UnexpectedAnswerError(f"y must have the bytes of its shape, got {data.nbytes}")
        return {"y": tensor}


def _parse_shape(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or len(given) > MAX_RANK or not all(type(size) is int for size in given):
        raise ValueError("a shape must be a list of whole numbers")
    return tuple(given)
