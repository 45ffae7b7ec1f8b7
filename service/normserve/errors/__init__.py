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
    """Base of the tree.  `detail` says what was expected and what was received, never the payload itself."""

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class MalformedHttpError(NormserveError):
    code = "malformed_http"


class UnsupportedTransferEncodingError(NormserveError):
    code = "unsupported_transfer_encoding"


class HeadersTooLargeError(NormserveError):
    code = "headers_too_large"


class RequestTimeoutError(NormserveError):
    code = "request_timeout"


class MalformedPayloadError(NormserveError):
    code = "malformed_payload"


class UnusableRegionError(NormserveError):
    code = "unusable_region"


class UnauthorizedError(NormserveError):
    code = "unauthorized"


class ForbiddenError(NormserveError):
    code = "forbidden"


class ForbiddenOriginError(NormserveError):
    code = "forbidden_origin"


class MisdirectedRequestError(NormserveError):
    code = "misdirected_request"


class NotFoundError(NormserveError):
    code = "not_found"


class UnknownLayerError(NotFoundError):
    code = "unknown_layer"


class MethodNotAllowedError(NormserveError):
    """Carries the methods that the resource allows."""

    code = "method_not_allowed"

    def __init__(self, detail: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.allowed = allowed


class NotAcceptableError(NormserveError):
    code = "not_acceptable"


class UnsupportedMediaTypeError(NormserveError):
    code = "unsupported_media_type"


class TooLargeError(NormserveError):
    code = "too_large"


class InvalidRequestError(NormserveError):
    """The request is well-formed, but its content is invalid."""


class InvalidParameterError(InvalidRequestError):
    code = "invalid_parameter"


class InvalidShapeError(InvalidRequestError):
    code = "invalid_shape"


class UnsupportedDtypeError(InvalidRequestError):
    code = "unsupported_dtype"


class MissingTensorError(InvalidRequestError):
    code = "missing_tensor"


class UnexpectedTensorError(InvalidRequestError):
    code = "unexpected_tensor"


class ClientLeftError(NormserveError):
    code = "client_left"


class DeadlineExceededError(NormserveError):
    code = "deadline_exceeded"


class ConfigurationError(NormserveError):
    """The server cannot start with its settings, however often it is started."""


class DeviceFailureError(NormserveError):
    code = "device_failure"


class RetryLaterError(NormserveError):
    """The request is valid, but cannot be served now: try again after `retry_after_s` seconds."""

    def __init__(self, detail: str, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryLaterError):
    code = "overloaded"


class TooManyConnectionsError(RetryLaterError):
    """A connection, or a request on it, is beyond a limit.

    Attributes:
        limit: the setting that defines it.
    """

    code = "too_many_connections"

    def __init__(self, limit: str) -> None:
        super().__init__(f"{limit} are open already")
        self.limit = limit


class RateLimitedError(RetryLaterError):
    code = "rate_limited"


class DrainingError(RetryLaterError):
    code = "draining"


class NotReadyError(RetryLaterError):
    code = "not_ready"


class StalledError(RetryLaterError):
    code = "stalled"


class ChangeFailedError(RetryLaterError):
    code = "change_failed"


class StorageError(RetryLaterError):
    code = "storage_failure"


class DeviceOutOfMemoryError(RetryLaterError):
    code = "device_out_of_memory"
