"""The gateway's HTTP connections to the server."""

from collections.abc import Iterable, Sequence

import httpx
import msgspec

from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError
from normserve.client.http.async_connection_pool import AsyncConnectionPool, run_steps
from normserve.client.http.message_heads import encode_request_head
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import TlsSettings
from normserve.client.responses.api_response import ApiResponse
from normserve.grpc.caller import Header
from normserve.grpc.statuses import CallError, Code, make_status_error

# The longest message of protobuf.
_MAX_RESPONSE_BYTES = 2**31 - 1

_CONNECT_S = 5.0
_IDLE_S = 30.0
MAX_SERVER_CONNECTIONS = 1024
"""Number of connections to the server, of which each has one call."""


class _ErrorDocument(msgspec.Struct):
    """The body of an error's response below `/v2`."""

    error: str


_ERROR = msgspec.json.Decoder(_ErrorDocument)


class ServerClient:
    """An HTTP client of one server, which all calls of the gateway share."""

    def __init__(self, url: str) -> None:
        """Make a client that is not connected yet.

        Args: url: `http+unix://PATH` or `http://HOST:PORT`.

        Raises:
            ValueError: the URL has another form.
        """
        self._address = ServerAddress.parse_url(url)
        if self._address.is_shared_memory:
            raise ValueError("the server's URL must be http+unix://PATH, http://HOST:PORT or https://HOST:PORT")
        self._pool = AsyncConnectionPool(self._address, TlsSettings(True), MAX_SERVER_CONNECTIONS, _IDLE_S)
        self._host = (b"Host", self._address.host_header.encode("ascii"))

    @property
    def display_name(self) -> str:
        """The server's address for messages."""
        return self._address.display_name

    async def send_request(
        self, method: str, path: str, headers: Iterable[Header], parts: Sequence[bytes | memoryview] | None = None
    ) -> ApiResponse:
        """Send a request and return its response, with any status.

        The connection is closed if the caller's task is cancelled, by which the server learns of it.

        Args:
            path: the target, quoted.
            parts: the parts of the body; None for no body.

        Raises:
            CallError: the server cannot be reached, or broke off.
        """
        own = [self._host, (b"Accept-Encoding", b"identity"), *headers]
        if parts is not None:
            own.append((b"Content-Length", b"%d" % sum(map(len, parts))))
        try:
            head = encode_request_head(method.encode(), self._address.make_target(path).encode("ascii"), own)
            return await self._exchange(head, parts or (), is_repeatable=method == "GET" or path.endswith("/infer"))
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise CallError(Code.UNAVAILABLE, "the server behind the gateway cannot be reached", 1.0) from None
        except httpx.LocalProtocolError as error:
            raise CallError(Code.INVALID_ARGUMENT, f"the call's metadata cannot be passed on: {error}") from None
        except httpx.TransportError as error:
            raise CallError(Code.UNAVAILABLE, f"the server behind the gateway broke off: {error}") from None
        except ClientError as error:
            raise CallError(Code.INTERNAL, f"the server's response cannot be passed on: {error}") from None

    async def request(
        self, method: str, path: str, headers: Iterable[Header], parts: Sequence[bytes | memoryview] | None = None
    ) -> ApiResponse:
        """Send a request and return its response, as `send_request` does.

        Raises:
            CallError: the server cannot be reached, or its response is an error.
        """
        response = await self.send_request(method, path, headers, parts)
        if response.status != 200:
            raise make_response_error(response)
        return response

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    async def _exchange(
        self, head: bytes, parts: Sequence[bytes | memoryview], *, is_repeatable: bool
    ) -> ApiResponse:
        """Send a request over a pooled connection.

        If a connection that was used before breaks without a byte of a response, the request is sent once more:
        the server closes idle connections.

        Args: is_repeatable: whether the request has the same result if the server has already processed it.
        """
        fresh = False
        while True:
            connection, is_used = await self._pool.acquire(Deadline(_CONNECT_S), fresh=fresh)
            try:
                return await run_steps(connection.exchange(head, parts, _MAX_RESPONSE_BYTES))
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if not (is_used and is_repeatable) or connection.has_answered:
                    raise
            finally:
                self._pool.release(connection)
            fresh = True


def make_response_error(response: ApiResponse) -> CallError:
    """Make the call's error from a response with the status of an error."""
    try:
        detail = _ERROR.decode(response.body).error
    except msgspec.DecodeError:
        detail = f"the server responded with status {response.status}"
    return make_status_error(response.status, detail, response.headers.get("retry-after"))
