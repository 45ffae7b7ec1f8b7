"""The exceptions of the client.

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
└── UnexpectedAnswerError        an answer that is none to what was asked: is this a normserve?

For any response, a call returns the requested result or raises one of these.  Their messages hold neither the
API key nor a body, and their quotations of a problem document are short and printable.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from normserve.client.quoting import quote_text


class ClientError(Exception):
    """The base class of the client's exceptions.

    Attributes:
        retryable: whether an identical request may succeed later.
        retry_after_s: how long the server asked to wait; None when it did not.
    """

    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None


class ApiError(ClientError):
    """An error response of the server, usually a problem document (RFC 9457).

    Attributes:
        status: the HTTP status.
        code: the cause as a word that programs can rely on, such as "invalid_shape"; "" where there is none.
        detail: the expected value and the actual one.
        request_id: names the request in the server's log.
        problem: the complete document as received; empty where the response held none.
    """

    def __init__(
        self,
        status: int,
        problem: Mapping[str, Any],
        request_id: str = "",
        retry_after_s: float | None = None,
        api_key: str | None = None,
    ) -> None:
        """Args: api_key: left out of every text but `problem`."""
        self.status = status
        self.problem = problem
        self.code = quote_text(problem.get("code"), 100, api_key)
        self.detail = quote_text(problem.get("detail"), 1000, api_key)
        self.request_id = quote_text(problem.get("request_id") or request_id, 128, api_key)
        self.retry_after_s = retry_after_s
        cause = self.code or quote_text(problem.get("title"), 100, api_key)
        detail = self.detail if problem else "the answer holds no problem document"
        super().__init__(f"{status} {cause}: {detail}" if cause else f"{status}: {detail}")


class InvalidRequestError(ApiError):
    """The request is malformed or invalid: `code` and `detail` say why."""


class UnauthorizedError(ApiError):
    """The server requires an API key, and the client's is missing or wrong."""


class NotFoundError(ApiError):
    """The named resource does not exist."""


class UnknownLayerError(NotFoundError):
    """No layer of that name is registered."""


class TooLargeError(ApiError):
    """The request is larger than the server accepts."""


class OverloadedError(ApiError):
    """The server is overloaded, and stayed so through all retries."""

    retryable = True


class UnavailableError(ApiError):
    """The server is starting, draining, unreachable for its proxy, or out of device memory, through all retries."""

    retryable = True


class DeadlineExceededError(ApiError):
    """The request's deadline passed before its execution began."""


class ServerFailureError(ApiError):
    """The server failed while it handled the request."""


class ConnectionFailedError(ClientError, ConnectionError):
    """No connection could be made, or it broke before the response was complete."""

    retryable = True


class RequestTimeoutError(ClientError, TimeoutError):
    """The call took longer than the client's own timeout, over all attempts and the pauses between them."""


class UnexpectedAnswerError(ClientError):
    """The response does not fit the request: too long, compressed, or not of the form that the API specifies."""
