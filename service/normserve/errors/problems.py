"""From errors to responses: the only table of statuses, and problem documents (RFC 9457).

Every transport uses these; the statuses are those of HTTP.
"""

import math
from http import HTTPStatus
from typing import Any

from normserve import errors
from normserve.errors import DeviceOutOfMemoryError, NormserveError, RetryLaterError

STATUSES: dict[type[NormserveError], int] = {
    errors.NormserveError: 500,
    errors.MalformedHttpError: 400,
    errors.MalformedPayloadError: 400,
    errors.UnusableRegionError: 400,
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
    errors.QuotaExhaustedError: 429,
    errors.RateLimitedError: 429,
    errors.HeadersTooLargeError: 431,
    errors.ClientLeftError: 499,
    errors.ConfigurationError: 500,
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


def get_status(error: NormserveError) -> int:
    """Return the HTTP status of an error."""
    return STATUSES[type(error)]


def make_problem_document(error: NormserveError, request_id: str) -> dict[str, Any]:
    """Make the JSON problem document (RFC 9457) of an error, which is the body of its response."""
    status = get_status(error)
    return {
        "type": f"urn:normserve:error:{error.code}",
        "title": get_status_title(status),
        "status": status,
        "detail": error.detail,
        "code": error.code,
        "request_id": request_id,
    }


def compute_retry_after_s(error: RetryLaterError) -> int:
    """Return the number of seconds after which the client may send the request again, at least 1."""
    return max(1, math.ceil(error.retry_after_s))


def convert_unexpected_error(error: BaseException) -> NormserveError:
    """Convert an exception that is no `NormserveError` into an error for the client, without the
    exception's details.

    The client learns only whether to try again: it is useful after a lack of memory.
    """
    if isinstance(error, MemoryError):
        return DeviceOutOfMemoryError("there is not enough memory for this request now")
    return NormserveError("internal error in the server")


def get_status_title(status: int) -> str:
    """Return the reason phrase of an HTTP status."""
    return "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
