"""The sockets as transports of httpx, for clients of its own: with its hooks, authentication and redirections."""

import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from normserve.client.http.address import Address
from normserve.client.http.awaiting import AsyncSockets
from normserve.client.http.awaiting import drive as drive_tasks
from normserve.client.http.blocking import Sockets, drive
from normserve.client.http.connection import Connection
from normserve.client.http.heads import AnswerHead, request_head
from normserve.client.http.opening import Trust
from normserve.client.http.steps import Steps
from normserve.client.http.waits import EachWait, Waits

#: As of httpx's own transports.
MAX_CONNECTIONS = 100
KEEP_S = 5.0


class SocketTransport(httpx.BaseTransport):
    """HTTP/1.1 over sockets that send a body from where it lies; what it does not do is done by httpx's transport.

    That is bodies of unknown length.  HTTP/2 and proxies are for `httpx.HTTPTransport`.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        max_connections: int = MAX_CONNECTIONS,
        uds: str | None = None,
    ) -> None:
        """Args:
        verify: of https, as `httpx.HTTPTransport` has it.
        max_connections: in use at once.
        uds: the path of a Unix domain socket to connect to, whatever a request's URL says.
        """
        self.sockets = Sockets(Trust(verify), max_connections, KEEP_S)
        self.uds = uds
        self._other = _Other(verify, max_connections, uds)
        self._own: httpx.HTTPTransport | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx has it."""
        if "transfer-encoding" in request.headers:
            if self._own is None:
                self._own = self._other.blocking()
            return self._own.handle_request(request)
        assert isinstance(request.stream, httpx.SyncByteStream)
        head, parts = _head(request), list(request.stream)
        waits = EachWait(request.extensions.get("timeout", {}))
        connection, _ = self.sockets.take(_address(request, self.uds), waits)
        try:
            sent, answer = drive(_begun(connection, head, parts, request.method), waits)
        except BaseException:
            self.sockets.give(connection)
            raise
        stream = _Stream(self.sockets, connection, answer, waits, sent=sent)
        return _response(answer, stream)

    def close(self) -> None:
        """Close all connections."""
        self.sockets.close()
        if self._own is not None:
            self._own.close()


class AsyncSocketTransport(httpx.AsyncBaseTransport):
    """As `SocketTransport`, for httpx's asynchronous client."""

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        max_connections: int = MAX_CONNECTIONS,
        uds: str | None = None,
    ) -> None:
        """Args: as `SocketTransport`."""
        self.sockets = AsyncSockets(Trust(verify), max_connections, KEEP_S)
        self.uds = uds
        self._other = _Other(verify, max_connections, uds)
        self._own: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx has it."""
        if "transfer-encoding" in request.headers:
            if self._own is None:
                self._own = self._other.asynchronous()
            return await self._own.handle_async_request(request)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        head, parts = _head(request), [part async for part in request.stream]
        waits = EachWait(request.extensions.get("timeout", {}))
        connection, _ = await self.sockets.take(_address(request, self.uds), waits)
        try:
            sent, answer = await drive_tasks(_begun(connection, head, parts, request.method), waits)
        except BaseException:
            self.sockets.give(connection)
            raise
        stream = _AsyncStream(self.sockets, connection, answer, waits, sent=sent)
        return _response(answer, stream)

    async def aclose(self) -> None:
        """Close all connections."""
        self.sockets.close()
        if self._own is not None:
            await self._own.aclose()


class _Other:
    """Makes httpx's own transports for the same servers."""

    def __init__(self, verify: ssl.SSLContext | bool, max_connections: int, uds: str | None) -> None:
        self._options: dict[str, Any] = {
            "verify": verify,
            "limits": httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=KEEP_S
            ),
            "uds": uds,
        }

    def blocking(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(**self._options)

    def asynchronous(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(**self._options)


class _Body:
    """An answer's body, and the connection that it comes by until it is closed."""

    def __init__(
        self,
        sockets: Sockets | AsyncSockets,
        connection: Connection,
        answer: AnswerHead,
        waits: Waits,
        *,
        sent: bool,
    ) -> None:
        self._sockets = sockets
        self._connection: Connection | None = connection
        self._answer = answer
        self._waits = waits
        self._sent = sent

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._sockets.give(connection)


class _Stream(_Body, httpx.SyncByteStream):
    """A body as it comes."""

    def __iter__(self) -> Iterator[bytes]:
        while self._connection is not None:
            piece = drive(self._connection.piece(self._answer), self._waits)
            if piece is None:
                self._connection.end(self._answer, self._sent)
                return
            yield bytes(piece)

    def close(self) -> None:
        """Give the connection back."""
        self._give_back()


class _AsyncStream(_Body, httpx.AsyncByteStream):
    """As `_Stream`."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None:
            piece = await drive_tasks(self._connection.piece(self._answer), self._waits)
            if piece is None:
                self._connection.end(self._answer, self._sent)
                return
            yield bytes(piece)

    async def aclose(self) -> None:
        """Give the connection back."""
        self._give_back()


def _head(request: httpx.Request) -> bytes:
    return request_head(request.method.encode("ascii"), request.url.raw_path, request.headers.raw)


def _address(request: httpx.Request, uds: str | None) -> Address:
    if request.url.scheme not in ("http", "https"):
        raise httpx.UnsupportedProtocol("a request's URL must begin with http:// or https://")
    address = Address.of_request(request.url)
    return address if uds is None else Address(address.host, address.port, address.tls, socket_path=uds)


def _begun(connection: Connection, head: bytes, parts: list[bytes], method: str) -> Steps[tuple[bool, AnswerHead]]:
    sent = yield from connection.send([head, *parts])
    answer = yield from connection.head(has_body=method != "HEAD")
    return sent, answer


def _response(answer: AnswerHead, stream: _Stream | _AsyncStream) -> httpx.Response:
    reason, fields = answer.lines()
    extensions = {"http_version": b"HTTP/1.1", "reason_phrase": reason}
    return httpx.Response(answer.status, headers=fields, stream=stream, extensions=extensions)
