"""Errors as gRPC statuses, by one table from the statuses of HTTP that the server's errors have."""

from typing import Any

import grpc

from normserve.grpc.schema import get_message_class

Code = grpc.StatusCode

STATUSES = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    405: Code.UNIMPLEMENTED,
    406: Code.INVALID_ARGUMENT,
    408: Code.UNAVAILABLE,
    413: Code.RESOURCE_EXHAUSTED,
    415: Code.INVALID_ARGUMENT,
    421: Code.INVALID_ARGUMENT,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    431: Code.INVALID_ARGUMENT,
    499: Code.CANCELLED,
    500: Code.INTERNAL,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}
"""The gRPC status of each HTTP status of the server."""

_STATUS, _RETRY_INFO = get_message_class("google.rpc.Status"), get_message_class("google.rpc.RetryInfo")


class CallError(Exception):
    """The refusal or failure of a call, as its client receives it.

    Attributes:
        code: the gRPC status.
        detail: the message for the client.
        retry_after_s: seconds after which the client may try again; None if that is unknown or useless.
    """

    def __init__(self, code: grpc.StatusCode, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.code, self.detail, self.retry_after_s = code, detail, retry_after_s


def make_status_error(status: int, detail: str, retry_after: str | None = None) -> CallError:
    """Make the error for a response of the server.

    Args:
        status: the HTTP status.
        detail: the text of the error.
        retry_after: the value of the header Retry-After, a number of seconds; None if it is absent.
    """
    retry_after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return CallError(STATUSES.get(status, Code.INTERNAL), detail, retry_after_s)


def make_trailer(error: CallError) -> tuple[tuple[str, Any], ...]:
    """Make the trailing metadata of an error: the retry delay, for gRPC's own retries and as `RetryInfo`."""
    if error.retry_after_s is None:
        return ()
    milliseconds = round(error.retry_after_s * 1000)
    info = _RETRY_INFO()
    info.retry_delay.FromMilliseconds(milliseconds)
    status = _STATUS(code=error.code.value[0], message=error.detail)
    status.details.add().Pack(info)
    return (
        ("grpc-retry-pushback-ms", str(milliseconds)),
        ("grpc-status-details-bin", status.SerializeToString()),
    )
