"""Inference requests and responses: messages of gRPC on one side, `/v2` with binary tensors on the other."""

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from normserve.client.responses.api_response import ApiResponse
from normserve.grpc.schema import get_message_class
from normserve.grpc.statuses import CallError, Code
from normserve.grpc.wire_format import split_request

_REQUEST, _RESPONSE = (
    get_message_class("inference.ModelInferRequest"),
    get_message_class("inference.ModelInferResponse"),
)

JSON_LENGTH = b"Inference-Header-Content-Length"
_JSON_LENGTH_KEY = JSON_LENGTH.decode().lower()

_REGION = "shared_memory_region"


class OutputLocation(msgspec.Struct):
    """The location of an output's bytes: after the JSON, or in a region."""

    binary_data_size: int | None = None
    shared_memory_region: str | None = None
    shared_memory_byte_size: int | None = None
    shared_memory_offset: int | None = None


class OutputDescription(msgspec.Struct):
    """The JSON description of one output tensor."""

    name: str
    datatype: str
    shape: list[int]
    parameters: OutputLocation


class ResponseDocument(msgspec.Struct):
    """The JSON header of an inference response."""

    model_name: str
    model_version: str
    outputs: list[OutputDescription]
    id: str = ""


_DOCUMENT = msgspec.json.Decoder(ResponseDocument)


@dataclass(frozen=True, slots=True)
class HttpInference:
    """An inference request as the server's HTTP has it.

    Attributes:
        path: the target of the request.
        json: the JSON header.
        tensors: views of the raw tensors, which follow the JSON.
        request_id: the id that the client gave the request; empty for none.
    """

    path: str
    json: bytes
    tensors: list[bytes | memoryview]
    request_id: str


def convert_request(message: bytes) -> HttpInference:
    """Convert the bytes of a ModelInferRequest; the raw tensors are views of them.

    Raises:
        CallError: the message is malformed, or its tensors do not have one source each.
    """
    head, raw = split_request(message)
    request = parse_message(_REQUEST, head)
    document: dict[str, Any] = {"inputs": []}
    tensors: list[bytes | memoryview] = []
    unused = iter(raw)
    for each in request.inputs:
        parameters = _read_parameters(each.parameters)
        if _REGION not in parameters:
            content = _find_content(each, unused, has_raw=bool(raw))
            parameters["binary_data_size"] = len(content)
            tensors.append(content)
        document["inputs"].append(
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": list(each.shape),
                "parameters": parameters,
            }
        )
    if next(unused, None) is not None:
        raise CallError(
            Code.INVALID_ARGUMENT,
            f"raw_input_contents must be those of the {len(tensors)} inputs that are not in shared memory, got"
            f" {len(raw)}",
        )
    if request.outputs:
        document["outputs"] = [
            {"name": each.name, "parameters": _read_parameters(each.parameters)} for each in request.outputs
        ]
    document["parameters"] = _read_parameters(request.parameters) | {"binary_data_output": True}
    if request.id:
        document["id"] = request.id
    path = f"{make_model_path(request.model_name, request.model_version)}/infer"
    return HttpInference(path, msgspec.json.encode(document), tensors, request.id)


def convert_response(response: ApiResponse) -> tuple[bytes, list[memoryview]]:
    """Convert the server's response to an inference request.

    Returns:
        a serialised ModelInferResponse without raw tensors, and a view of the raw bytes of each output; those of
        an output in shared memory are empty.

    Raises:
        CallError: the response is not one of this protocol.
    """
    body = response.body
    length = response.headers.get(_JSON_LENGTH_KEY)
    position = len(body) if length is None else int(length)
    try:
        document = _DOCUMENT.decode(body[:position])
    except msgspec.DecodeError:
        raise CallError(Code.INTERNAL, "the server's response is not that of an inference") from None
    made = _RESPONSE(model_name=document.model_name, model_version=document.model_version, id=document.id)
    tensors = []
    for each in document.outputs:
        output = made.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        parameters, nbytes = each.parameters, each.parameters.binary_data_size or 0
        if parameters.shared_memory_region is not None:
            output.parameters[_REGION].string_param = parameters.shared_memory_region
            output.parameters["shared_memory_byte_size"].int64_param = parameters.shared_memory_byte_size or 0
            output.parameters["shared_memory_offset"].int64_param = parameters.shared_memory_offset or 0
        tensors.append(body[position : position + nbytes])
        position += nbytes
    if position != len(body):
        raise CallError(Code.INTERNAL, "the server's response has another length than its tensors")
    return made.SerializeToString(), tensors


def parse_message(message_class: Any, data: bytes) -> Any:
    """Parse the bytes of a message.

    Raises:
        CallError: they are no such message.
    """
    try:
        return message_class.FromString(data)
    except Exception:
        # The exceptions of protobuf's implementations have no common class.
        raise CallError(Code.INVALID_ARGUMENT, "the bytes of the request are not a protobuf message") from None


def make_model_path(name: str, version: str = "") -> str:
    """Return the path of a model below `/v2`, without a version if that is empty.

    Raises:
        CallError: the name is empty.
    """
    if not name:
        raise CallError(Code.INVALID_ARGUMENT, "the request must name a model")
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _find_content(each: Any, raw: Iterator[memoryview], *, has_raw: bool) -> bytes | memoryview:
    """Return the bytes of an input that is not in shared memory: the next raw tensor, or its typed contents.

    Args:
        each: an InferInputTensor.
        has_raw: whether the request has raw tensors, and so no contents.

    Raises:
        CallError: the input has no content or two, or contents of another type.
    """
    if not each.HasField("contents"):
        content = next(raw, None)
        if content is None:
            raise CallError(Code.INVALID_ARGUMENT, f"{each.name[:64]!r} has no raw_input_contents")
        return content
    if has_raw:
        raise CallError(
            Code.INVALID_ARGUMENT, f"{each.name[:64]!r} must have contents or raw_input_contents, not both"
        )
    given = [field.name for field, _ in each.contents.ListFields()]
    if each.datatype != "FP32" or given not in ([], ["fp32_contents"]):
        raise CallError(
            Code.INVALID_ARGUMENT,
            f"{each.name[:64]!r} of datatype {each.datatype[:32]!r} must have raw_input_contents: only FP32 has"
            " contents, fp32_contents",
        )
    # Little-endian, as all platforms of this server are.
    return array("f", each.contents.fp32_contents).tobytes()


def _read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Read a map of parameters, each of which has a value of one of several types.

    Raises:
        CallError: one has no value, or NaN or infinity, which the JSON of `/v2` cannot represent.
    """
    values = {}
    for name, each in parameters.items():
        choice = each.WhichOneof("parameter_choice")
        if choice is None:
            raise CallError(Code.INVALID_ARGUMENT, f"the parameter {name[:64]!r} has no value")
        value = getattr(each, choice)
        if isinstance(value, float) and not math.isfinite(value):
            raise CallError(Code.INVALID_ARGUMENT, f"the parameter {name[:64]!r} must be finite, got {value}")
        values[name] = value
    return values
