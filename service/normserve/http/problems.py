"""From errors to HTTP: the one table of statuses, and problem documents (RFC 9457)."""

import json
import math
import secrets
from http import HTTPStatus

from normserve import errors
from normserve.codec import media_types
from normserve.errors import NormserveError, RetryLaterError

PROBLEM_JSON = "application/problem+json"

STATUSES: dict[type[NormserveError], int] = {
    errors.NormserveError: 500,
    errors.MalformedHttpError: 400,
    errors.MalformedPayloadError: 400,
    errors.UnauthorizedError: 401,
    errors.ForbiddenError: 403,
    errors.ForbiddenOriginError: 403,
    errors.NotFoundError: 404,
    errors.UnknownLayerError: 404,
    errors.MethodNotAllowedError: 405,
    errors.NotAcceptableError: 406,
    errors.RequestTimeoutError: 408,
    errors.TooLargeError: 413,
    errors.UnsupportedMediaTypeError: 415,
    errors.MisdirectedRequestError: 421,
    errors.InvalidRequestError: 422,
    errors.InvalidParameterError: 422,
    errors.InvalidShapeError: 422,
    errors.UnsupportedDtypeError: 422,
    errors.MissingTensorError: 422,
    errors.UnexpectedTensorError: 422,
    errors.RetryLaterError: 503,
    errors.OverloadedError: 429,
    errors.RateLimitedError: 429,
    errors.HeadersTooLargeError: 431,
    errors.ClientLeftError: 499,
    errors.DeviceFailureError: 500,
    errors.UnsupportedTransferEncodingError: 501,
    errors.DrainingError: 503,
    errors.TooManyConnectionsError: 503,
    errors.NotReadyError: 503,
    errors.StalledError: 503,
    errors.ChangeFailedError: 503,
    errors.StorageError: 503,
    errors.DeviceOutOfMemoryError: 503,
    errors.DeadlineExceededError: 504,
}

# Where the error itself ends the connection's use: nothing more will be answered on it.
_CLOSING = (
    errors.DrainingError,
    errors.MalformedHttpError,
    errors.HeadersTooLargeError,
    errors.RequestTimeoutError,
    errors.TooManyConnectionsError,
    errors.UnsupportedTransferEncodingError,
)

NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""Stands on every response: a browser takes a body for what it is said to be."""


def status_of(error: NormserveError) -> int:
    """The HTTP status that answers an error."""
    return STATUSES[type(error)]


def problem(error: NormserveError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Render an error as a response: its status, its headers and its body."""
    status = status_of(error)
    body = json.dumps(
        {
            "type": f"urn:normserve:error:{error.code}",
            "title": _title(status),
            "status": status,
            "detail": error.detail,
            "code": error.code,
            "request_id": request_id,
        }
    ).encode()
    headers = [
        (b"content-type", PROBLEM_JSON.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    return status, headers + _extra_headers(error), body


def render(error: NormserveError) -> bytes:
    """The whole response to what never became a request, as it goes over the wire."""
    request_id = secrets.token_hex(16)
    status, headers, body = problem(error, request_id)
    head = [f"HTTP/1.1 {status} {_title(status)}".encode()]
    head += [name + b": " + value for name, value in (NO_SNIFFING, *headers)]
    head.append(b"x-request-id: " + request_id.encode())
    return b"\r\n".join([*head, b"", body])


def _title(status: int) -> str:
    return "Client Closed Request" if status == 499 else HTTPStatus(status).phrase


def _extra_headers(error: NormserveError) -> list[tuple[bytes, bytes]]:
    headers = []
    if isinstance(error, RetryLaterError):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, errors.UnauthorizedError):
        headers.append((b"www-authenticate", b'Bearer realm="normserve"'))
    if isinstance(error, errors.MethodNotAllowedError):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, errors.UnsupportedMediaTypeError):
        headers.append((b"accept", ", ".join(media_types.CANONICAL).encode()))
        headers.append((b"accept-encoding", b"identity"))
    if isinstance(error, _CLOSING):
        headers.append((b"connection", b"close"))
    return headers
