"""Errors as HTTP responses: problem documents (RFC 9457), and under `/v2` the error format of its protocol."""

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from normserve import errors
from normserve.codec import media_types
from normserve.errors import NormserveError, RetryLaterError
from normserve.errors.problems import compute_retry_after_s, get_status, get_status_title, make_problem_document

PROBLEM_JSON = "application/problem+json"
JSON = "application/json"

_INFERENCE_PROTOCOL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*)?/v2(?:[/?#]|$)")

# Errors after which the server answers no more requests on the connection.
_CLOSING = (
    errors.DrainingError,
    errors.MalformedHttpError,
    errors.HeadersTooLargeError,
    errors.RequestTimeoutError,
    errors.TooManyConnectionsError,
    errors.UnsupportedTransferEncodingError,
)

NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""A header of every response: browsers must use the declared content type."""


def make_problem_response(
    error: NormserveError, request_id: str, target: str = ""
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Make the response to an error: its status, its headers and its body.

    The body is a problem document (RFC 9457), or below `/v2` the error object of that protocol.

    Args: target: the request's path, or its complete target; empty if unknown.
    """
    status = get_status(error)
    is_plain = _INFERENCE_PROTOCOL.match(target) is not None
    document: dict[str, Any] = {"error": error.detail} if is_plain else make_problem_document(error, request_id)
    if isinstance(error, errors.TooManyConnectionsError):
        # The protocol is not known yet: add the member that clients of `/v2` expect to the problem document.
        document["error"] = error.detail
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", (JSON if is_plain else PROBLEM_JSON).encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        # Also where the body is not read or has no code: of HEAD, below `/v2`, and where curl saves it as a tensor.
        (b"x-error-code", error.code.encode()),
    ]
    accepted_types = (JSON, "application/octet-stream") if is_plain else media_types.CANONICAL
    return status, headers + _make_error_headers(error, accepted_types), body


def render_problem_response(error: NormserveError, target: str = "") -> bytes:
    """Return all bytes of the response to input that could not be parsed as a request.

    Args: target: the received part of the request target; empty if unknown.
    """
    request_id = secrets.token_hex(16)
    status, headers, body = make_problem_response(error, request_id, target)
    head = [f"HTTP/1.1 {status} {get_status_title(status)}".encode()]
    head += [name + b": " + value for name, value in (NO_SNIFFING, *headers)]
    head.append(b"x-request-id: " + request_id.encode())
    return b"\r\n".join([*head, b"", body])


def _make_error_headers(error: NormserveError, accepted_types: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """Make the headers that only some errors have, such as `Retry-After` or `Allow`.

    Args: accepted_types: media types that the response to an unsupported one lists.
    """
    headers = []
    if isinstance(error, RetryLaterError):
        headers.append((b"retry-after", str(compute_retry_after_s(error)).encode()))
    if isinstance(error, errors.UnauthorizedError):
        headers.append((b"www-authenticate", b'Bearer realm="normserve"'))
    if isinstance(error, errors.MethodNotAllowedError):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, errors.UnsupportedMediaTypeError):
        headers.append((b"accept", ", ".join(accepted_types).encode()))
        headers.append((b"accept-encoding", b"identity"))
    if isinstance(error, _CLOSING):
        headers.append((b"connection", b"close"))
    return headers
