"""Calls through httpx: by way of a proxy, or over an httpx transport that the caller made."""

import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from http.cookiejar import CookieJar
from typing import Any, cast

import httpx

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.http.waiting import enforce_deadlines
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import LimitedBody, TransportErrorTranslator, refuse_redirect
from normserve.client.trace_context import get_current_headers
from normserve.codec.media_types import SAFETENSORS

# Large enough for its overhead to be nothing, small enough for the transport's copy of it to stay in cache.
_CHUNK_BYTES = 256 * 1024


class SocketTransport(httpx.HTTPTransport):
    """An httpx transport for an `httpx.Client`, with the connection limits of this package's clients.

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
    """An httpx transport for an `httpx.AsyncClient`, with the connection limits of this package's clients.

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
    """A `CallTransport` over httpx's blocking client."""

    def __init__(self, transport: httpx.BaseTransport | None = None, **options: Any) -> None:
        """Args:
        transport: httpx's; None leaves the choice to httpx, proxies of the environment included.
        options: of httpx's client.
        """
        hooks = {"response": [_refuse_redirect]}
        self._client = httpx.Client(transport=transport, event_hooks=hooks, **_add_fixed_options(options))
        enforce_deadlines(self._client)

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Do as `CallTransport.exchange`."""
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
                    reception.append(piece)
                    if not reception.is_wanted:
                        break
            finally:
                response.close()
        return ApiResponse(response.status_code, response.headers, reception.get_body())

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class AsyncHttpxTransport:
    """An `AsyncCallTransport` over httpx's asynchronous client."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, **options: Any) -> None:
        """Args: as `HttpxTransport`."""
        hooks = {"response": [_refuse_redirect_async]}
        self._client = httpx.AsyncClient(transport=transport, event_hooks=hooks, **_add_fixed_options(options))

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Do as `AsyncCallTransport.exchange`."""
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
                            reception.append(piece)
                            if not reception.is_wanted:
                                break
                finally:
                    await response.aclose()
        return ApiResponse(response.status_code, response.headers, reception.get_body())

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _add_fixed_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        **options,
        # Each request carries its own remaining time.
        "timeout": None,
        # The key must not go where a server points to, and a server has nothing to remember here.
        "follow_redirects": False,
        "cookies": _EmptyCookieJar(),
    }


def _make_request_headers(parts: Sequence[bytes | memoryview] | None) -> dict[str, str]:
    headers = dict(get_current_headers())
    if parts is not None:
        headers |= {"content-type": SAFETENSORS, "content-length": str(sum(map(len, parts)))}
    return headers


def _split_chunks(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
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
