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

from normserve.client.quoting import sanitise_text


class ClientError(Exception):
    """The base class of the client's exceptions.

    Attributes:
        retryable: whether an identical request may succeed later.
        retry_after_s: seconds that the server asks to wait; None if it does not.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client, ClientError
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     try:
        ...         client.layer_norm(np.zeros((8, 16), np.float32), weight=np.ones(4, np.float32))
        ...     except ClientError as error:
        ...         print(type(error).__name__, error.retryable)
        InvalidRequestError False
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
        """Make the error of a response.

        Args:
            status: the HTTP status.
            problem: the problem document; empty if the response has none.
            request_id: the response's request id, for a document without one; "" by default.
            retry_after_s: seconds that the server asks to wait; None (default) if it does not.
            api_key: a key that is removed from every text except `problem`; None (default) for none.
        """
        self.status = status
        self.problem = problem
        self.code = sanitise_text(problem.get("code"), 100, api_key)
        self.detail = sanitise_text(problem.get("detail"), 1000, api_key)
        self.request_id = sanitise_text(problem.get("request_id") or request_id, 128, api_key)
        self.retry_after_s = retry_after_s
        cause = self.code or sanitise_text(problem.get("title"), 100, api_key)
        detail = self.detail if problem else "the answer holds no problem document"
        super().__init__(f"{status} {cause}: {detail}" if cause else f"{status}: {detail}")


class InvalidRequestError(ApiError):
    """The request is malformed or invalid (400, 415, 422); `code` and `detail` have the cause."""


class UnauthorizedError(ApiError):
    """The server requires an API key, and the client's is missing or wrong (401)."""


class NotFoundError(ApiError):
    """The named resource does not exist (404)."""


class UnknownLayerError(NotFoundError):
    """No layer of that name is registered (404)."""


class TooLargeError(ApiError):
    """The request is larger than the server accepts (413)."""


class OverloadedError(ApiError):
    """The server is overloaded (429), or this client's own arrays fill its user's quota of shared memory."""

    retryable = True


class UnavailableError(ApiError):
    """The server is starting, draining, out of device memory or not reachable by a proxy (503), after retries."""

    retryable = True


class DeadlineExceededError(ApiError):
    """The request's deadline, `timeout_ms`, passed before its execution began (504)."""


class ServerFailureError(ApiError):
    """The server failed while it handled the request (any other 5xx)."""


class ConnectionFailedError(ClientError, ConnectionError):
    """No connection could be made, or it broke before the response was complete."""

    retryable = True


class RequestTimeoutError(ClientError, TimeoutError):
    """The call took longer than the client's own timeout, over all attempts and the pauses between them."""


class UnexpectedAnswerError(ClientError):
    """The response does not fit the request: too long, compressed, or not of the form that the API specifies."""
