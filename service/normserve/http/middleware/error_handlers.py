"""Handlers that FastAPI calls for errors of routes and of the framework."""

import difflib
import itertools
import re

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from normserve.errors import (
    InvalidParameterError,
    MalformedPayloadError,
    MethodNotAllowedError,
    NormserveError,
    NotFoundError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedMediaTypeError,
)
from normserve.errors.problems import convert_unexpected_error
from normserve.http.http_exchange import HttpExchange
from normserve.http.middleware.request_middleware import send_problem
from normserve.requests.request_parameters import suggest_operation

_LONGEST_COMPARED, _CLOSE = 100, 0.6
# The end of a path to the pass that has none of its own: it is computed by that of the operation.
_FORWARD = re.compile(r"[/_](?:forward|fwd)/?$")

# The errors for statuses with which the framework refuses requests.
_FRAMEWORKS_ERRORS: dict[int, type[NormserveError]] = {
    400: MalformedPayloadError,
    401: UnauthorizedError,
    413: TooLargeError,
    415: UnsupportedMediaTypeError,
    422: InvalidParameterError,
}


class ProblemResponse(Response):
    """A response that sends the problem document of an error through the middleware's `send_problem`."""

    def __init__(self, error: NormserveError, exchange: HttpExchange) -> None:
        super().__init__(status_code=500)
        self._error, self._exchange = error, exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_problem(self._error, self._exchange, send)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, a wrong method, or an invalid request.

    An OPTIONS request is answered with the methods that its path allows.
    """
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await handle_normserve_error(request, NotFoundError(_describe_missing_path(request)))
    if error.status_code != 405:
        return await handle_normserve_error(
            request, _FRAMEWORKS_ERRORS.get(error.status_code, NormserveError)(error.detail)
        )
    allowed = _find_allowed_methods(request)
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": ", ".join(allowed)})
    return await handle_normserve_error(
        request, MethodNotAllowedError(f"this path takes {', '.join(allowed)}", allowed)
    )


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """Answer invalid route parameters with FastAPI's first message, without the values that were sent."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return await handle_normserve_error(request, InvalidParameterError(f"{where}: {first['msg']}"))


async def handle_unexpected_error(request: Request, error: Exception) -> Response:
    """Answer an unexpected error with a problem document; the framework raises it again, and the edge logs it."""
    return await handle_normserve_error(request, convert_unexpected_error(error))


async def handle_normserve_error(request: Request, error: Exception) -> Response:
    """Return the response with the problem document of an error that a FastAPI route raised.

    An error of a direct route does not pass through FastAPI: the middleware answers it.
    """
    assert isinstance(error, NormserveError)
    return ProblemResponse(error, request.state.exchange)


def _describe_missing_path(request: Request) -> str:
    """Format the message for a path without a route; it names the most similar path that has one, or the operation
    that computes what the path names.
    """
    path = request.url.path[:_LONGEST_COMPARED]
    path = _FORWARD.sub("/infer" if path.startswith("/v2/") else "", path)
    if operation := suggest_operation(path.removeprefix("/v1/").removesuffix("/backward")):
        return f"nothing is at this path{operation}; GET /docs shows what there is"
    closest, similarity = "", _CLOSE
    for template in {getattr(route, "path", "") for route in request.app.state.routes}:
        requested_path, existing_path = _strip_path_parameters(path, template)
        compared = difflib.SequenceMatcher(None, requested_path, existing_path)
        if compared.quick_ratio() > similarity and (ratio := compared.ratio()) > similarity:
            closest, similarity = f"; the closest path is {template}", ratio
    return f"nothing is at this path{closest}; GET /docs shows what there is"


def _strip_path_parameters(path: str, template: str) -> tuple[str, str]:
    """Return a request's path and a route's template, with the route's parameter segments empty in both.

    Thus the values of parameters do not change how similar the two are.
    """
    template_segments = template.split("/")
    is_parameter = [segment.startswith("{") for segment in template_segments]
    path_segments = itertools.zip_longest(path.split("/"), is_parameter)
    return (
        "/".join("" if parameter else segment for segment, parameter in path_segments if segment is not None),
        "/".join(
            "" if parameter else segment for segment, parameter in zip(template_segments, is_parameter, strict=True)
        ),
    )


def _find_allowed_methods(request: Request) -> list[str]:
    """Return the sorted methods of all routes that match the request's path, and OPTIONS."""
    methods = {"OPTIONS"}
    for route in request.app.state.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)
