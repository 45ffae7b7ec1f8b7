"""Problem documents (RFC 9457) as responses of HTTP."""

import json
import secrets

from normserve import errors
from normserve.codec import media_types
from normserve.errors import NormserveError, RetryLaterError
from normserve.problems import document, retry_after, status_of, title_of

PROBLEM_JSON = "application/problem+json"

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


def problem(error: NormserveError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Render an error as a response: its status, its headers and its body."""
    status = status_of(error)
    body = json.dumps(document(error, request_id)).encode()
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
    head = [f"HTTP/1.1 {status} {title_of(status)}".encode()]
    head += [name + b": " + value for name, value in (NO_SNIFFING, *headers)]
    head.append(b"x-request-id: " + request_id.encode())
    return b"\r\n".join([*head, b"", body])


def _extra_headers(error: NormserveError) -> list[tuple[bytes, bytes]]:
    headers = []
    if isinstance(error, RetryLaterError):
        headers.append((b"retry-after", str(retry_after(error)).encode()))
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
