"""What a caller of the client may want to catch.

ClientError
├── ApiError                     the server answered with a problem document
│   ├── InvalidRequestError      400, 415, 422: the request will never succeed as it is
│   ├── UnauthorizedError        401
│   ├── NotFoundError            404
│   │   └── UnknownLayerError    no layer of that name
│   ├── TooLargeError            413
│   ├── OverloadedError          429, also after all retries
│   ├── UnavailableError         503, also after all retries: draining, not ready or out of device memory
│   ├── DeadlineExceededError    504: `timeout_ms` passed before execution began
│   └── ServerFailureError       any other 5xx
├── ConnectionFailedError        no connection, or it broke; a ConnectionError too
├── RequestTimeoutError          the client's own timeout passed; a TimeoutError too
└── UnexpectedAnswerError        an answer that the API does not know: is this a normserve?
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

import httpx


class ClientError(Exception):
    """Base of the tree.

    Attributes:
        retryable: whether the same request may succeed later.
        retry_after_s: how long the server asked to wait; None when it did not.
    """

    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None


class ApiError(ClientError):
    """The server answered with a problem document (RFC 9457).

    Attributes:
        status: the HTTP status.
        code: the cause as a word that programs can rely on, such as "invalid_shape".
        detail: what was expected and what came.
        request_id: names the request in the server's log.
        problem: the whole document.
    """

    def __init__(
        self,
        status: int,
        problem: Mapping[str, Any],
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code", ""))
        self.detail = str(problem.get("detail", ""))
        self.request_id = str(problem.get("request_id") or request_id)
        self.retry_after_s = retry_after_s
        super().__init__(f"{status} {self.code or problem.get('title', '')}: {self.detail}")


class InvalidRequestError(ApiError):
    """The request is malformed or means nothing: `code` and `detail` say why."""


class UnauthorizedError(ApiError):
    """The server wants an API key, and this is none or the wrong one."""


class NotFoundError(ApiError):
    """There is nothing of that name."""


class UnknownLayerError(NotFoundError):
    """No layer of that name is registered."""


class TooLargeError(ApiError):
    """The request is larger than the server accepts."""


class OverloadedError(ApiError):
    """The server is full; it stayed so through all retries."""

    retryable = True


class UnavailableError(ApiError):
    """The server is starting, leaving, gone from behind a proxy, or out of device memory, through all retries."""

    retryable = True


class DeadlineExceededError(ApiError):
    """The request's deadline passed before its execution began."""


class ServerFailureError(ApiError):
    """The server failed."""


class ConnectionFailedError(ClientError, ConnectionError):
    """No connection could be made, or it broke before the answer was complete."""

    retryable = True


class RequestTimeoutError(ClientError, TimeoutError):
    """The answer took longer than the client's own timeout."""


class UnexpectedAnswerError(ClientError):
    """The answer is none that the API knows."""


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


def api_error(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Make the error of an answer with a status of 400 or above, whoever on the way sent it."""
    problem = _read_problem(body)
    default = ServerFailureError if status >= 500 else ApiError
    if status in _FROM_BETWEEN and not problem.get("code"):
        default = UnavailableError
    kind = _BY_CODE.get(str(problem.get("code"))) or _BY_STATUS.get(status, default)
    return kind(status, problem, headers.get("x-request-id", ""), _seconds(headers.get("retry-after")))


def _read_problem(body: bytes) -> Mapping[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if isinstance(problem, dict):
        return problem
    return {"detail": body[:200].decode("utf-8", "replace")}


def _seconds(retry_after: str | None) -> float | None:
    """How long a Retry-After asks to wait: a number of seconds, or a date; None when it is neither."""
    if not retry_after:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


@contextmanager
def transport_errors() -> Iterator[None]:
    """Turn what httpx raises while a request is under way into our tree."""
    try:
        yield
    except (httpx.ConnectTimeout, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
        raise ConnectionFailedError(str(error) or type(error).__name__) from error
    except httpx.TimeoutException as error:
        raise RequestTimeoutError(str(error) or type(error).__name__) from error
