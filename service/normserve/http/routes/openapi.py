"""The OpenAPI description of the application, in the form that Swagger UI 4 supports."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from normserve import errors
from normserve.codec.media_types import NPY
from normserve.errors import NormserveError
from normserve.errors.problems import STATUSES, make_problem_document
from normserve.http.routes.api_descriptions import EXAMPLE_PARAMETERS, RouteExample, find_example
from normserve.http.routes.route_scopes import RouteScopes

# Swagger UI 4 refuses 3.1; nothing here needs it.
OPENAPI_VERSION = "3.0.3"

_KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "The API key."}
_PARAMETER = re.compile(r"{(\w+)}")
_SAMPLE = {"sample": {"summary": "an array to try it with", "externalValue": "sample.npy"}}
_HEADERS = {
    "Server-Timing": ("string", "Milliseconds in each stage."),
    "X-Kernel-Bytes": ("integer", "The fewest bytes that this request must move."),
    "X-Kernel-Bandwidth": ("integer", "The fewest bytes of the launch, a second of its kernel time."),
    "X-Batch-Size": ("integer", "Requests that shared the launch."),
}
# The description shows a problem document of each of these errors.
_SHOWN_ERRORS = (
    errors.InvalidShapeError("x must be [..., 768] to match weight [768], got [2, 512]"),
    errors.UnknownLayerError("no layer of that name is registered"),
    errors.OverloadedError("as many requests are inside as may be: 256"),
    errors.NotReadyError("the server is still warming up"),
)
_REQUEST_ID = "2688c9a37667b02a0161b9894444878d"


def make_openapi_getter(app: FastAPI, scopes: RouteScopes | None) -> Callable[[], dict[str, Any]]:
    """Make the function that returns the application's OpenAPI description, created at its first call.

    Args:
        scopes: which routes require an API key; None if no keys are required.
    """

    def get_description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _make_description(app, scopes)
        return app.openapi_schema

    app.openapi_version = OPENAPI_VERSION
    return get_description


def _make_description(app: FastAPI, scopes: RouteScopes | None) -> dict[str, Any]:
    """Create FastAPI's description, and add this server's parameters, errors, examples and key."""
    description = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=app.openapi_version,
        description=app.description,
        routes=list(_list_routes_without_head(app)),
    )
    # FastAPI's own schemas describe errors that this server never sends.
    description["components"] = {"schemas": {"Problem": _make_problem_schema(), "Error": _make_error_schema()}}
    if scopes is not None:
        description["components"]["securitySchemes"] = {"key": _KEY_SCHEME}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            operation["operationId"] = make_operation_id(method, path)
            _describe_parameters(operation, path)
            _describe_responses(operation, method, path)
            if scopes is not None and scopes.is_key_required(method.upper(), path):
                operation["security"] = [{"key": []}]
    return description


def make_operation_id(method: str, path: str) -> str:
    """Make the name of an operation in generated clients from its method and path, not from the server's code."""
    return "_".join([method, *re.findall(r"\w+", path)])


def _list_routes_without_head(app: FastAPI) -> Iterator[APIRoute]:
    """Yield a copy of each documented route without HEAD, a method that every GET route also accepts."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            alone = copy.copy(route)
            alone.methods = set(route.methods or ()) - {"HEAD"}
            yield alone


def _describe_parameters(operation: dict[str, Any], path: str) -> None:
    """Drop the parameters that FastAPI derived from the handler, add those in the path, and set examples.
    Documented query parameters are kept.

    Derived parameters are recognised by their title.
    """
    of_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ]
    of_query = [each for each in operation.get("parameters", ()) if "title" not in each["schema"]]
    operation["parameters"] = of_path + of_query
    for each in operation["parameters"]:
        if each["name"] in EXAMPLE_PARAMETERS:
            each["example"] = EXAMPLE_PARAMETERS[each["name"]]


def _describe_responses(operation: dict[str, Any], method: str, path: str) -> None:
    """Set the examples, the successful responses and the error response of an operation."""
    answers = operation["responses"]
    answers.pop("422", None)
    example = find_example(method.upper(), path)
    if example is None:
        _describe_tensor_bodies(operation, is_forward=not path.endswith("/backward"))
    else:
        _add_example(operation, example)
        if (method, path) == ("put", "/v1/layers/{name}"):
            answers["201"] = answers["200"] | {"description": "The layer is new."}
        if path.endswith("/infer"):
            # Tensors follow the JSON as bytes if it says so, in either direction.
            for message in (operation["requestBody"], answers["200"]):
                message["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    answers["default"] = _describe_inference_errors() if path.startswith("/v2") else _describe_problems()


def _describe_tensor_bodies(operation: dict[str, Any], *, is_forward: bool) -> None:
    """Describe the tensors in an operation's request and response, and the headers of the result.

    A backward pass cannot be requested with npy, which contains a single array.
    """
    sent, answer = operation["requestBody"]["content"], operation["responses"]["200"]
    if is_forward:
        sent[NPY] = sent[NPY] | {"examples": _SAMPLE}
    else:
        # One array is not enough for gradients.
        operation["requestBody"]["content"] = {name: each for name, each in sent.items() if name != NPY}
    # FastAPI adds its own default response type.
    answer["content"].pop("application/json", None)
    answer["headers"] = {
        name: {"description": what, "schema": {"type": kind}} for name, (kind, what) in _HEADERS.items()
    }


def _add_example(operation: dict[str, Any], example: RouteExample) -> None:
    """Set the example request and response of an operation without tensors."""
    if example.request_body is not None:
        content = {"application/json": {"schema": {"type": "object"}, "example": example.request_body}}
        operation["requestBody"] = {"required": bool(example.request_body), "content": content}
    (answer,) = [response for status, response in operation["responses"].items() if status.startswith("2")]
    answer["description"] = "Done."
    answer.pop("content", None)
    if isinstance(example.response_body, bytes):
        schema = {"type": "string", "format": "binary"}
        answer["content"] = {example.media_type: {"schema": schema, "examples": _SAMPLE}}
    elif example.response_body is not None:
        answer["content"] = {
            example.media_type: {"schema": _infer_schema(example.response_body), "example": example.response_body}
        }


def _infer_schema(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "string"}
    return {"type": "array", "items": {"type": "object"}} if isinstance(value, list) else {"type": "object"}


def _describe_problems() -> dict[str, Any]:
    """Describe the error response of all paths except those below `/v2`."""
    shown = {
        error.code: {
            "summary": f"{STATUSES[type(error)]} {error.code}",
            "value": make_problem_document(error, _REQUEST_ID),
        }
        for error in _SHOWN_ERRORS
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        "description": "Any error: a problem document (RFC 9457).",
        "headers": _describe_error_headers(),
        "content": {"application/problem+json": {"schema": schema, "examples": shown}},
    }


def _describe_inference_errors() -> dict[str, Any]:
    """Describe the error response of the paths below `/v2`."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        "description": "Any error, as the protocol has them.",
        "headers": _describe_error_headers(),
        "content": {"application/json": {"schema": schema, "example": {"error": _SHOWN_ERRORS[0].detail}}},
    }


def _describe_error_headers() -> dict[str, Any]:
    return {
        "X-Error-Code": {"description": "The cause.", "schema": _make_code_schema()},
        "Retry-After": {"description": "Of 429 and 503: seconds.", "schema": {"type": "integer", "minimum": 1}},
    }


def _make_code_schema() -> dict[str, Any]:
    return {"type": "string", "enum": sorted(_collect_error_codes(NormserveError))}


def _make_problem_schema() -> dict[str, Any]:
    properties = {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string", "description": "What was expected and what came."},
        "code": {**_make_code_schema(), "description": "The cause."},
        "request_id": {"type": "string", "description": "Names the request in the server's log."},
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _make_error_schema() -> dict[str, Any]:
    return {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _collect_error_codes(kind: type[NormserveError]) -> set[str]:
    return {kind.code}.union(*map(_collect_error_codes, kind.__subclasses__()))
