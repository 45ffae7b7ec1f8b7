"""The methods whose requests and responses are small documents, each one request to the server's JSON."""

import base64
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from google.protobuf.json_format import ParseDict, ParseError

from normserve.client.responses.api_response import ApiResponse
from normserve.grpc.caller import Header
from normserve.grpc.inference_messages import make_model_path, parse_message
from normserve.grpc.message_budget import MessageReservation
from normserve.grpc.schema import INFERENCE, list_methods
from normserve.grpc.server_client import ServerClient, make_response_error
from normserve.grpc.statuses import CallError, Code

HttpDocument = tuple[str, str, dict[str, Any] | None]
"""The method, the path and the JSON of a request; None for no body."""


class DocumentMethod:
    """A method whose request and response are small documents."""

    def __init__(self, server: ServerClient, name: str) -> None:
        self._server = server
        self._request_class, self._response_class = list_methods(INFERENCE)[name]
        self._convert_request, self._convert_response = ROUTES[name]

    async def __call__(self, message: bytes, headers: list[Header], reservation: MessageReservation) -> bytes:
        """Send the server the request that corresponds to a message, and return the bytes of the response."""
        method, path, document = self._convert_request(parse_message(self._request_class, message))
        parts, own = None, headers
        if document is not None:
            parts, own = [msgspec.json.encode(document)], [(b"Content-Type", b"application/json"), *headers]
        response = await self._server.send_request(method, path, own, parts)
        try:
            made = ParseDict(self._convert_response(response), self._response_class())
        except (ParseError, msgspec.DecodeError, TypeError):
            raise CallError(Code.INTERNAL, "the server's response is not that of this protocol") from None
        serialised: bytes = made.SerializeToString()
        return serialised


def _make_get(path: str) -> Callable[[Any], HttpDocument]:
    return lambda request: ("GET", path, None)


def _make_model_get(suffix: str) -> Callable[[Any], HttpDocument]:
    return lambda request: ("GET", f"{make_model_path(request.name, request.version)}{suffix}", None)


def _convert_statistics_request(request: Any) -> HttpDocument:
    if not request.name:
        return "GET", "/v2/models/stats", None
    return "GET", f"{make_model_path(request.name, request.version)}/stats", None


def _convert_index_request(request: Any) -> HttpDocument:
    _require_no_repository(request)
    return "POST", "/v2/repository/index", {"ready": request.ready}


def _make_repository_post(action: str) -> Callable[[Any], HttpDocument]:
    """Make the conversion of a request that loads or unloads a model."""

    def convert(request: Any) -> HttpDocument:
        _require_no_repository(request)
        # Bytes are files of a model, which the server refuses by the parameter's name.
        parameters = {
            name: value
            if not isinstance(value := getattr(each, each.WhichOneof("parameter_choice") or "bool_param"), bytes)
            else ""
            for name, each in request.parameters.items()
        }
        path = f"/v2/repository/models/{_quote_name(request.model_name)}/{action}"
        return "POST", path, {"parameters": parameters} if parameters else {}

    return convert


def _require_no_repository(request: Any) -> None:
    """Refuse a request that names a repository: the server has one, without a name.

    Raises:
        CallError: it names one.
    """
    if request.repository_name:
        raise CallError(Code.INVALID_ARGUMENT, "repository_name must be empty: there is one repository")


def _make_region_path(kind: str, name: str, action: str) -> str:
    """Return the path of a region's, or of all regions'."""
    region = f"/region/{_quote_name(name)}" if name else ""
    return f"/v2/{kind}sharedmemory{region}/{action}"


def _make_region_request(kind: str, method: str, action: str) -> Callable[[Any], HttpDocument]:
    return lambda request: (method, _make_region_path(kind, request.name, action), None)


def _convert_system_registration(request: Any) -> HttpDocument:
    document = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
    _require_region_name(request.name)
    return "POST", _make_region_path("system", request.name, "register"), document


def _convert_cuda_registration(request: Any) -> HttpDocument:
    handle = base64.b64encode(request.raw_handle).decode("ascii")
    document = {
        "raw_handle": {"b64": handle},
        "device_id": request.device_id,
        "byte_size": request.byte_size,
    }
    _require_region_name(request.name)
    return "POST", _make_region_path("cuda", request.name, "register"), document


def _require_region_name(name: str) -> None:
    if not name:
        raise CallError(Code.INVALID_ARGUMENT, "the request must name the region")


def _quote_name(name: str) -> str:
    """Quote a name for a path.

    Raises:
        CallError: the name is empty.
    """
    if not name:
        raise CallError(Code.INVALID_ARGUMENT, "the request must name a model")
    return quote(name, safe="")


def _read_document(response: ApiResponse) -> Any:
    """Return the JSON of a response.

    Raises:
        CallError: the response is an error.
    """
    if response.status != 200:
        raise make_response_error(response)
    return msgspec.json.decode(response.body)


def _make_flag_reader(name: str, false_statuses: tuple[int, ...]) -> Callable[[ApiResponse], Mapping[str, Any]]:
    """Make the conversion of a response that says by its status whether something is so.

    Args: false_statuses: those that say that it is not.
    """

    def read(response: ApiResponse) -> Mapping[str, Any]:
        if response.status not in (200, *false_statuses):
            raise make_response_error(response)
        return {name: response.status == 200}

    return read


def _read_nothing(response: ApiResponse) -> Mapping[str, Any]:
    if response.status != 200:
        raise make_response_error(response)
    return {}


def _make_wrapping_reader(name: str) -> Callable[[ApiResponse], Mapping[str, Any]]:
    """Make the conversion of a response that is the value of the message's only field."""
    return lambda response: {name: _read_document(response)}


def _read_regions(response: ApiResponse) -> Mapping[str, Any]:
    return {"regions": {each["name"]: each for each in _read_document(response)}}


_NOT_READY = (400, 503)
ROUTES: dict[str, tuple[Callable[[Any], HttpDocument], Callable[[ApiResponse], Mapping[str, Any]]]] = {
    "ServerLive": (_make_get("/v2/health/live"), _make_flag_reader("live", _NOT_READY)),
    "ServerReady": (_make_get("/v2/health/ready"), _make_flag_reader("ready", _NOT_READY)),
    "ServerMetadata": (_make_get("/v2"), _read_document),
    "ModelReady": (_make_model_get("/ready"), _make_flag_reader("ready", (*_NOT_READY, 404))),
    "ModelMetadata": (_make_model_get(""), _read_document),
    "ModelConfig": (_make_model_get("/config"), _make_wrapping_reader("config")),
    "ModelStatistics": (_convert_statistics_request, _read_document),
    "RepositoryIndex": (_convert_index_request, _make_wrapping_reader("models")),
    "RepositoryModelLoad": (_make_repository_post("load"), _read_nothing),
    "RepositoryModelUnload": (_make_repository_post("unload"), _read_nothing),
} | {
    f"{label}SharedMemory{name}": route
    for label, kind, register in (
        ("System", "system", _convert_system_registration),
        ("Cuda", "cuda", _convert_cuda_registration),
    )
    for name, route in (
        ("Status", (_make_region_request(kind, "GET", "status"), _read_regions)),
        ("Register", (register, _read_nothing)),
        ("Unregister", (_make_region_request(kind, "POST", "unregister"), _read_nothing)),
    )
}
"""The methods by name, each with the conversions of its request and of its response."""
