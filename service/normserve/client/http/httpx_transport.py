"""Calls by httpx: through a proxy, or over an httpx transport that the caller made.

The blocking client's sockets respect the call's deadline over all waits together.  httpx's timeouts begin anew at
each read and each write, so a client would wait without end for a server that sends a byte now and then.  httpx's
connection pool opens sockets through a network backend, which is replaced here by one that checks the request's
deadline (`RemainingSeconds`) before each wait.
"""

import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from http.cookiejar import CookieJar
from typing import Any, cast

import httpcore
import httpx

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline, RemainingSeconds
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import LimitedBody, TransportErrorTranslator, refuse_redirect
from normserve.client.trace_context import get_current_headers
from normserve.codec.media_types import SAFETENSORS

# Large enough for its overhead to be nothing, small enough for the transport's copy of it to stay in cache.
_CHUNK_BYTES = 256 * 1024


class SocketTransport(httpx.HTTPTransport):
    """An httpx transport for `httpx.Client` that keeps every connection open after its request.  There are at most
    `max_connections`.

    Examples:
        >>> import httpx
        >>> from normserve.client import SocketTransport
        >>> client = httpx.Client(transport=SocketTransport(max_connections=8))
    """

    def __init__(
        self, *, verify: ssl.SSLContext | bool = True, max_connections: int = 100, uds: str | None = None
    ) -> None:
        """Make a transport for an `httpx.Client`.

        Args:
            verify: for https: True (default) trusts well-known authorities, False any certificate, an
                `ssl.SSLContext` its own.
            max_connections: connections in use at once; default 100.
            uds: the path of a Unix domain socket to connect to, whatever the host in a request's URL; None
                (default) connects to that host.
        """
        super().__init__(verify=verify, limits=_make_limits(max_connections), uds=uds)


class AsyncSocketTransport(httpx.AsyncHTTPTransport):
    """An httpx transport for `httpx.AsyncClient` that keeps every connection open after its request.

    There are at most `max_connections`.

    Examples:
        >>> import httpx
        >>> from normserve.client import AsyncSocketTransport
        >>> client = httpx.AsyncClient(transport=AsyncSocketTransport(max_connections=8))
    """

    def __init__(
        self, *, verify: ssl.SSLContext | bool = True, max_connections: int = 100, uds: str | None = None
    ) -> None:
        """Make a transport for an `httpx.AsyncClient`.

        Args:
            verify: for https: True (default) trusts well-known authorities, False any certificate, an
                `ssl.SSLContext` its own.
            max_connections: connections in use at once; default 100.
            uds: the path of a Unix domain socket to connect to, whatever the host in a request's URL; None
                (default) connects to that host.
        """
        super().__init__(verify=verify, limits=_make_limits(max_connections), uds=uds)


def _make_limits(max_connections: int) -> httpx.Limits:
    return httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)


class HttpxTransport:
    """A `CallTransport` that sends calls through an `httpx.Client`.

    It serves proxies, and httpx transports that the user passed.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None, **options: Any) -> None:
        """Args:
        transport: httpx's; None leaves the choice to httpx, proxies of the environment included.
        options: of httpx's client.
        """
        hooks = {"response": [_refuse_redirect]}
        self._client = httpx.Client(transport=transport, event_hooks=hooks, **_add_fixed_options(options))
        _enforce_deadlines(self._client)

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call through httpx and return its response, with any status.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """
        parts = call.encode_body()
        request = self._client.build_request(
            call.method,
            call.path,
            params=call.params,
            headers=_make_request_headers(parts),
            content=None if parts is None else _split_chunks(parts),
            extensions={"timeout": deadline.make_httpx_timeouts()},
        )
        with TransportErrorTranslator(deadline):
            response = self._client.send(request, stream=True)
            try:
                reception = LimitedBody(response.status_code, response.headers, call.max_bytes)
                # As it comes: httpx's own iterators would decompress it.
                pieces = cast(httpx.SyncByteStream, response.stream) if reception.is_wanted else ()
                for piece in pieces:
                    deadline.check()
                    reception.append_if_wanted(piece)
                    if not reception.is_wanted:
                        break
            finally:
                response.close()
        return ApiResponse(response.status_code, response.headers, reception.get_body())

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class AsyncHttpxTransport:
    """An `AsyncCallTransport` that sends calls through an `httpx.AsyncClient`.

    It serves proxies, and httpx transports that the user passed.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, **options: Any) -> None:
        """Make a transport.

        Args:
            transport: httpx's; None leaves the choice to httpx, proxies of the environment included.
            options: of httpx's client.
        """
        hooks = {"response": [_refuse_redirect_async]}
        self._client = httpx.AsyncClient(transport=transport, event_hooks=hooks, **_add_fixed_options(options))

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call through httpx and return its response, with any status.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """
        parts = call.encode_body()
        request = self._client.build_request(
            call.method,
            call.path,
            params=call.params,
            headers=_make_request_headers(parts),
            content=None if parts is None else _split_chunks_async(parts),
        )
        with TransportErrorTranslator(deadline):
            async with deadline.make_asyncio_timeout():
                response = await self._client.send(request, stream=True)
                try:
                    reception = LimitedBody(response.status_code, response.headers, call.max_bytes)
                    if reception.is_wanted:
                        # As it comes: httpx's own iterators would decompress it.
                        async for piece in cast(httpx.AsyncByteStream, response.stream):
                            reception.append_if_wanted(piece)
                            if not reception.is_wanted:
                                break
                finally:
                    await response.aclose()
        return ApiResponse(response.status_code, response.headers, reception.get_body())

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _add_fixed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Add the options that both httpx clients always have: no client-wide timeout, no redirects and no cookies.

    Each request has its own deadline.
    """
    return {
        **options,
        # Each request carries its own remaining time.
        "timeout": None,
        # The key must not go where a server points to, and a server has nothing to remember here.
        "follow_redirects": False,
        "cookies": _EmptyCookieJar(),
    }


def _make_request_headers(parts: Sequence[bytes | memoryview] | None) -> dict[str, str]:
    """Return the headers of one request: the trace context, and the body's type and length if there is a body."""
    headers = dict(get_current_headers())
    if parts is not None:
        headers |= {"content-type": SAFETENSORS, "content-length": str(sum(map(len, parts)))}
    return headers


def _split_chunks(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the parts of a body in chunks, so that the transport's copy of a chunk stays in the CPU's cache."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK_BYTES):
            # httpx is typed for bytes and content with any buffer of bytes.
            yield cast(bytes, view[start : start + _CHUNK_BYTES])


async def _split_chunks_async(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    for chunk in _split_chunks(parts):
        yield chunk


class _EmptyCookieJar(CookieJar):
    """A cookie jar that stores no cookies, because Python's parser of them raises unexpected errors."""

    def extract_cookies(self, response: object, request: object) -> None:
        """Ignore the cookies of a response."""


def _refuse_redirect(response: httpx.Response) -> None:
    # Before httpx reads where to.
    refuse_redirect(response.status_code)


async def _refuse_redirect_async(response: httpx.Response) -> None:
    refuse_redirect(response.status_code)


def _enforce_deadlines(http: httpx.Client) -> None:
    """Replace the network backends of an httpx client, so that every wait ends at its request's deadline.

    A transport that is not httpx's own is left as it is: it is given the time that is left when a request
    begins, for each of its waits.
    """
    for transport in (http._transport, *http._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if isinstance(pool, httpcore.ConnectionPool) and not isinstance(pool._network_backend, _DeadlineBackend):
            pool._network_backend = _DeadlineBackend(pool._network_backend)


_Options = Iterable[Any] | None


class _DeadlineBackend(httpcore.NetworkBackend):
    """A network backend that opens sockets through another backend and enforces request deadlines on them."""

    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._backend = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _Options = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first of a host's addresses that accepts a connection.  All attempts together end at the
        request's deadline.

        The inner backend would give each address the full timeout.
        """
        failure: Exception | None = None
        for address in _resolve_addresses(host, port):
            remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
            try:
                return _DeadlineStream(
                    self._backend.connect_tcp(address, port, remaining_s, local_address, socket_options)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError("the host has no address")

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: _Options = None
    ) -> httpcore.NetworkStream:
        """Connect to a Unix socket within the request's deadline."""
        remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
        return _DeadlineStream(self._backend.connect_unix_socket(path, remaining_s, socket_options))


def _resolve_addresses(host: str, port: int) -> list[str]:
    """Return the distinct IP addresses of a host's name, in the order in which to try them.

    Raises:
        httpcore.ConnectError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A name of which no query can be made: a part of it is too long.
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(str(error)) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _DeadlineStream(httpcore.NetworkStream):
    """A network stream that waits no longer than the request's deadline."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._stream = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _get_remaining_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all bytes within the request's deadline, directly to the socket.

        The inner stream would start its timeout anew after each partial send.  It is used only for TLS within a
        proxy's TLS, where it must encrypt the bytes first.
        """
        # The inner stream would begin anew to wait whenever a part has gone.
        connected = self._stream.get_extra_info("socket")
        is_tls = self._stream.get_extra_info("ssl_object") is not None
        if is_tls and not isinstance(connected, ssl.SSLSocket):
            # TLS within a proxy's TLS: the bytes must be encrypted by that stream first.
            self._stream.write(buffer, _get_remaining_s(timeout, httpcore.WriteTimeout))
            return
        rest = memoryview(buffer)
        while rest:
            remaining_s = _get_remaining_s(timeout, httpcore.WriteTimeout)
            try:
                connected.settimeout(remaining_s)
                rest = rest[connected.send(rest) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """Start TLS within the request's deadline; return the encrypted stream, which enforces deadlines, too."""
        remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, remaining_s))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _get_remaining_s(timeout: float | None, error: type[httpcore.TimeoutException]) -> float | None:
    """Return the seconds that a wait may take; raise `error` if the request's deadline has passed.

    Args:
        timeout: httpx's timeout; of a `RemainingSeconds`, the deadline is read anew.  None is without limit.
    """
    remaining_s = timeout.deadline.get_remaining_s() if isinstance(timeout, RemainingSeconds) else timeout
    if remaining_s is not None and remaining_s <= 0:
        raise error("the call's time is over")
    return remaining_s
