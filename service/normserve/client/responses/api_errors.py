"""Error responses as exceptions, and the JSON documents of a server."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from normserve.client.errors import (
    ApiError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerFailureError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownLayerError,
)


def parse_strict_json(body: bytes) -> Any:
    """Parse a JSON document, and refuse values such as NaN that Python's parser accepts but JSON lacks.

    Raises:
        ValueError: it is no JSON, nests deeper than Python's parser goes, names NaN or an infinity, which
            JSON does not have, or holds half of a surrogate pair, which is no text.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_BY_CODE: dict[str, type[ApiError]] = {"unknown_layer": UnknownLayerError}
_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequestError,
    401: UnauthorizedError,
    404: NotFoundError,
    413: TooLargeError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: OverloadedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}

# Without one of the server's own codes these are a proxy's, whose server went away with the request.  To ask again
# is safe: operations change nothing, and to register a layer twice is to register it.
_FROM_BETWEEN = (500, 502)


def make_api_error(status: int, headers: Mapping[str, str], body: bytes, api_key: str | None = None) -> ApiError:
    """Make the exception for a response with a status of 400 or above, from the server or a proxy.

    Args:
        status, headers, body: of the response; the body may be empty.
        api_key: left out of the error's texts.
    """
    problem = _read_problem(body)
    code = problem.get("code")
    default = ServerFailureError if status >= 500 else ApiError
    if status in _FROM_BETWEEN and not code:
        default = UnavailableError
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    kind = kind or _BY_STATUS.get(status, default)
    return kind(
        status,
        problem,
        headers.get("x-request-id", ""),
        _parse_retry_after_s(headers.get("retry-after")),
        api_key=api_key,
    )


def _read_problem(body: bytes) -> Mapping[str, Any]:
    """Return the problem document in an error's body; {} if the body is no JSON object."""
    try:
        problem = parse_strict_json(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _parse_retry_after_s(retry_after: str | None) -> float | None:
    """Parse a Retry-After header, a number of seconds or a date, to seconds from now; None for any other text."""
    if not retry_after:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    # IndexError and OverflowError are raised for dates outside the range of Python's datetime.
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
