"""All errors of a request, as one tree of exceptions.  No HTTP here: `problems` maps each to a status.

NormserveError
├── MalformedHttpError           malformed_http         the bytes are not a well-formed HTTP request
├── UnsupportedTransferEncodingError  unsupported_transfer_encoding
├── HeadersTooLargeError         headers_too_large
├── RequestTimeoutError          request_timeout        header or body arrived too slowly
├── MalformedPayloadError        malformed_payload      the bytes are not well-formed safetensors or npy
├── UnusableRegionError          unusable_region        shared memory that is not registered, or cannot be
├── UnauthorizedError            unauthorized           the API key is missing, unknown or expired
├── ForbiddenError               forbidden              the API key may not do this
├── ForbiddenOriginError         forbidden_origin       a page of another origin sent it
├── MisdirectedRequestError      misdirected_request    Host names another server
├── NotFoundError                not_found
│   └── UnknownLayerError        unknown_layer
├── MethodNotAllowedError        method_not_allowed
├── NotAcceptableError           not_acceptable         the client accepts none of the representations
├── UnsupportedMediaTypeError    unsupported_media_type
├── TooLargeError                too_large
├── QuotaExhaustedError          overloaded             the client itself holds the memory that it lacks
├── InvalidRequestError                                 well-formed, but the content is invalid
│   ├── InvalidParameterError    invalid_parameter
│   ├── InvalidShapeError        invalid_shape
│   ├── UnsupportedDtypeError    unsupported_dtype
│   ├── MissingTensorError       missing_tensor
│   └── UnexpectedTensorError    unexpected_tensor
├── ClientLeftError              client_left
├── DeadlineExceededError        deadline_exceeded
├── ConfigurationError           internal               the server cannot start with its settings; in no response
├── DeviceFailureError           device_failure         permanent: the process must be replaced
└── RetryLaterError                                     carries retry_after_s
    ├── OverloadedError          overloaded
    ├── TooManyConnectionsError  too_many_connections
    ├── RateLimitedError         rate_limited           more requests per second than the API key allows
    ├── DrainingError            draining
    ├── NotReadyError            not_ready
    ├── StalledError             stalled                operations wait and none finishes
    ├── ChangeFailedError        change_failed          not every process could change a layer, so none did
    ├── StorageError             storage_failure        the disk is full or fails
    └── DeviceOutOfMemoryError   device_out_of_memory
"""

from collections.abc import Sequence
from typing import ClassVar


class NormserveError(Exception):
    """The base class of all errors of a request.

    `detail` has the expected and the received values, never the payload itself.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class MalformedHttpError(NormserveError):
    """The received bytes are not a well-formed HTTP request (400)."""

    code = "malformed_http"


class UnsupportedTransferEncodingError(NormserveError):
    """The request's body has a transfer coding before chunked (501)."""

    code = "unsupported_transfer_encoding"


class HeadersTooLargeError(NormserveError):
    """The request's header, or the trailer of its chunked body, has too many bytes (431)."""

    code = "headers_too_large"


class RequestTimeoutError(NormserveError):
    """The client sent the request's header or body too slowly (408)."""

    code = "request_timeout"


class MalformedPayloadError(NormserveError):
    """A body or message is not well-formed in its format, such as safetensors, npy or JSON (400)."""

    code = "malformed_payload"


class UnusableRegionError(NormserveError):
    """A region of shared memory is not registered, or cannot be used as the request demands (400)."""

    code = "unusable_region"


class UnauthorizedError(NormserveError):
    """The API key is missing, unknown or expired (401)."""

    code = "unauthorized"


class ForbiddenError(NormserveError):
    """The API key lacks the scope that the request needs (403)."""

    code = "forbidden"


class ForbiddenOriginError(NormserveError):
    """The request was sent by a web page of an origin that is not allowed (403)."""

    code = "forbidden_origin"


class MisdirectedRequestError(NormserveError):
    """The request's Host header names a host for which this server does not answer (421)."""

    code = "misdirected_request"


class NotFoundError(NormserveError):
    """The URL names nothing that the server has (404)."""

    code = "not_found"


class UnknownLayerError(NotFoundError):
    """No layer is registered under the requested name (404)."""

    code = "unknown_layer"


class MethodNotAllowedError(NormserveError):
    """The resource does not allow the request's method (405); `allowed` has the methods that it allows."""

    code = "method_not_allowed"

    def __init__(self, detail: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.allowed = allowed


class NotAcceptableError(NormserveError):
    """The result cannot be represented in any format that the client accepts (406)."""

    code = "not_acceptable"


class UnsupportedMediaTypeError(NormserveError):
    """The request's body is compressed, or in a format that the route does not read (415)."""

    code = "unsupported_media_type"


class TooLargeError(NormserveError):
    """The request, or a layer to be registered, exceeds a limit of size or number (413)."""

    code = "too_large"


class QuotaExhaustedError(NormserveError):
    """A client's own segments fill its user's quota of shared memory (429).

    This is no `RetryLaterError`, because waiting does not help until the client frees some.
    """

    code = "overloaded"


class InvalidRequestError(NormserveError):
    """The request is well-formed, but its content is invalid (422)."""


class InvalidParameterError(InvalidRequestError):
    """A parameter of the request is unknown or has an invalid value, alone or with the others (422)."""

    code = "invalid_parameter"


class InvalidShapeError(InvalidRequestError):
    """A tensor's shape is invalid, or does not fit the other tensors or the layer (422)."""

    code = "invalid_shape"


class UnsupportedDtypeError(InvalidRequestError):
    """A tensor has an element type that the server, or this tensor's role, does not allow (422)."""

    code = "unsupported_dtype"


class MissingTensorError(InvalidRequestError):
    """A tensor that the operation needs was not sent (422)."""

    code = "missing_tensor"


class UnexpectedTensorError(InvalidRequestError):
    """The request sends or asks for a tensor that the operation does not have (422)."""

    code = "unexpected_tensor"


class ClientLeftError(NormserveError):
    """The client disconnected before the request was complete or answered; counted as status 499, never sent."""

    code = "client_left"


class DeadlineExceededError(NormserveError):
    """The deadline that the client set for the request passed before its execution began (504)."""

    code = "deadline_exceeded"


class ConfigurationError(NormserveError):
    """The server cannot start with its settings, however often it is started.  No response has this error."""


class DeviceFailureError(NormserveError):
    """The device has failed permanently, and the process must be replaced (500)."""

    code = "device_failure"


class RetryLaterError(NormserveError):
    """The request is valid, but cannot be served now: try again after `retry_after_s` seconds."""

    def __init__(self, detail: str, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryLaterError):
    """The server's limit of requests or bytes in progress, or the client's share, is reached (429)."""

    code = "overloaded"


class TooManyConnectionsError(RetryLaterError):
    """A connection, or a request on it, is refused because a limit of open connections is reached (503).

    Attributes:
        limit: the setting that defines it.
    """

    code = "too_many_connections"

    def __init__(self, limit: str) -> None:
        super().__init__(f"{limit} are open already")
        self.limit = limit


class RateLimitedError(RetryLaterError):
    """The API key has sent more requests per second than it may (429)."""

    code = "rate_limited"


class DrainingError(RetryLaterError):
    """The server is shutting down, and finishes only the requests that it has admitted (503)."""

    code = "draining"


class NotReadyError(RetryLaterError):
    """The server cannot compute yet: it is warming up, loading layers, or replacing the device's process (503)."""

    code = "not_ready"


class StalledError(RetryLaterError):
    """Requests wait for the device, and none has finished for a while (503)."""

    code = "stalled"


class ChangeFailedError(RetryLaterError):
    """A layer could not be changed in every process of the server, so none has changed it (503)."""

    code = "change_failed"


class StorageError(RetryLaterError):
    """The server could not write to its disk, or has no pages for shared memory (503)."""

    code = "storage_failure"


class DeviceOutOfMemoryError(RetryLaterError):
    """The device, or the host for a CPU backend, has too little memory for the request now (503)."""

    code = "device_out_of_memory"
