"""Calls over the client's own HTTP connections, without httpx."""

import base64
import functools
from typing import Any

import httpx

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.http.async_connection_pool import AsyncConnectionPool
from normserve.client.http.async_connection_pool import run_steps as drive_tasks
from normserve.client.http.connection import ClientHttpConnection
from normserve.client.http.connection_pool import ConnectionPool, make_blocking_receiver, run_steps
from normserve.client.http.message_heads import encode_request_head
from normserve.client.http.server_address import ServerAddress
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import TransportErrorTranslator, refuse_redirect
from normserve.client.trace_context import get_current_headers
from normserve.codec.media_types import SAFETENSORS

_CONTENT_TYPE = SAFETENSORS.encode()


class RequestEncoder:
    """An encoder of calls as HTTP requests to one server."""

    def __init__(self, address: ServerAddress, api_key: str | None = None, userinfo: str = "") -> None:
        """Args:
        address: of the server.
        api_key: sent as a bearer token.
        userinfo: NAME:PASSWORD, sent in place of a key.
        """
        self.address = address
        # Compression would cost more time than the bytes that it saves: floats hardly shrink.
        self._common_headers = [
            (b"Host", address.host_header.encode("ascii")),
            (b"Accept", b"*/*"),
            (b"Accept-Encoding", b"identity"),
            (b"User-Agent", b"normserve-client"),
        ]
        if userinfo:
            self._common_headers.append((b"Authorization", b"Basic " + base64.b64encode(userinfo.encode())))
        elif api_key is not None:
            self._common_headers.append((b"Authorization", b"Bearer " + api_key.encode("ascii")))
        # Callers often repeat a request with other contents of the tensors.
        self._get_head = functools.lru_cache(256)(self._encode_head)

    def encode(self, call: ApiCall[Any]) -> tuple[bytes, list[bytes | memoryview]]:
        """Encode a call as the head of an HTTP request and the parts of its body.

        The head carries the caller's trace context, if a span is current.
        """
        parts = call.encode_body()
        length = None if parts is None else sum(map(len, parts))
        head = self._get_head(call.method, call.target, length)
        if headers := get_current_headers():
            own = [b"%b: %b\r\n" % (name.encode("ascii"), value.encode("ascii")) for name, value in headers]
            # Before the empty line that ends the head.
            head = b"".join([head[:-2], *own, b"\r\n"])
        return head, parts or []

    def _encode_head(self, method: str, target: str, length: int | None) -> bytes:
        own = [] if length is None else [(b"Content-Type", _CONTENT_TYPE), (b"Content-Length", b"%d" % length)]
        target = self.address.make_target(target)
        return encode_request_head(method.encode("ascii"), target.encode("ascii"), [*self._common_headers, *own])


class DirectTransport:
    """A `CallTransport` that sends calls over the client's own HTTP connections, without httpx."""

    def __init__(self, requests: RequestEncoder, sockets: ConnectionPool) -> None:
        self._requests = requests
        self._sockets = sockets

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call over a pooled connection and return its response, with any status.

        If a connection that was used before breaks without a byte of a response, any call but a deletion is sent
        again over a new connection.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """
        head, parts = self._requests.encode(call)
        fill = make_blocking_receiver(deadline)
        with TransportErrorTranslator(deadline):
            fresh = False
            while True:
                connection, used = self._sockets.acquire(deadline, fresh=fresh)
                try:
                    return _refuse_redirect(
                        run_steps(connection.exchange(head, parts, call.max_bytes, blocking_receive=fill), deadline)
                    )
                except (httpx.NetworkError, httpx.RemoteProtocolError):
                    if not (used and _can_resend(call, connection)):
                        raise
                finally:
                    self._sockets.release(connection)
                fresh = True

    def close(self) -> None:
        """Close all connections."""
        self._sockets.close()


class AsyncDirectTransport:
    """An `AsyncCallTransport` that sends calls over the client's own HTTP connections, without httpx."""

    def __init__(self, requests: RequestEncoder, sockets: AsyncConnectionPool) -> None:
        self._requests = requests
        self._sockets = sockets

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call over a pooled connection and return its response, with any status.

        If a connection that was used before breaks without a byte of a response, any call but a deletion is sent
        again over a new connection.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """
        head, parts = self._requests.encode(call)
        with TransportErrorTranslator(deadline):
            fresh = False
            async with deadline.make_asyncio_timeout():
                while True:
                    connection, used = await self._sockets.acquire(deadline, fresh=fresh)
                    try:
                        return _refuse_redirect(await drive_tasks(connection.exchange(head, parts, call.max_bytes)))
                    except (httpx.NetworkError, httpx.RemoteProtocolError):
                        if not (used and _can_resend(call, connection)):
                            raise
                    finally:
                        self._sockets.release(connection)
                    fresh = True

    async def close(self) -> None:
        """Close all connections."""
        self._sockets.close()


def _refuse_redirect(answer: ApiResponse) -> ApiResponse:
    refuse_redirect(answer.status)
    return answer


def _can_resend(call: ApiCall[Any], connection: ClientHttpConnection) -> bool:
    """Return whether a call whose reused connection broke may be sent again at once over a new connection.

    The server may have closed the connection while the request was under way.  Operations change nothing,
    and registering a layer twice has the effect of once; but the second deletion of a layer would not find
    it.
    """
    return not connection.has_answered and call.method != "DELETE"
