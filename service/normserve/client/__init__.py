"""The Python client: takes arrays of numpy, torch, JAX and other libraries, and returns arrays of the same kind.

    from normserve.client import Client

    with Client("http://127.0.0.1:8000") as client:
        result = client.layer_norm(x, weight, bias, eps=1e-5)
        result.y, result.timing.stages_ms, result.timing.kernel_bandwidth

A `HostTensor`, raw memory with a shape and an element type, is accepted as an array too, and returned for one.
`AsyncClient` has the same methods as coroutines.  An operation has no side effects, so both clients repeat it,
within the limits of a `RetryPolicy`, when the server is overloaded or unavailable (429, 503) or the connection
breaks.

The URL selects the transport: `http://`, `https://`, or `http+unix://PATH` for HTTP over a Unix domain socket.
Both clients speak HTTP over sockets of their own; a proxy that the environment names is used by way of httpx.
`SocketTransport` and `AsyncSocketTransport` are httpx's own transports for httpx's clients, with limits as
here.

A server is not trusted.  A call returns tensors of the shapes and element types that it asked for or raises a
`ClientError`, takes no more bytes than they have, and is over when `timeout_s` is.  Redirections are not followed,
compressed responses not inflated, and cookies not kept.
"""

from normserve.client.async_client import AsyncClient
from normserve.client.client import Client
from normserve.client.errors import (
    ApiError,
    ClientError,
    ConnectionFailedError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTimeoutError,
    ServerFailureError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnexpectedAnswerError,
    UnknownLayerError,
)
from normserve.client.http.httpx_transport import AsyncSocketTransport, SocketTransport
from normserve.client.method_signatures import DEFAULT_URL
from normserve.client.results import BackwardResult, ForwardResult, Timing
from normserve.client.retries import RetryPolicy
from normserve.memory.tensors import DType, HostTensor

__all__ = [
    "DEFAULT_URL",
    "ApiError",
    "AsyncClient",
    "AsyncSocketTransport",
    "BackwardResult",
    "Client",
    "ClientError",
    "ConnectionFailedError",
    "DType",
    "DeadlineExceededError",
    "ForwardResult",
    "HostTensor",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "RequestTimeoutError",
    "RetryPolicy",
    "ServerFailureError",
    "SocketTransport",
    "Timing",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "UnexpectedAnswerError",
    "UnknownLayerError",
]
