"""The choice of a client's transport, by its URL, its arguments and the environment.

The arguments are validated here, among them the API key and the certificates.
"""

import ssl
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from normserve.client.argument_checks import check_count, check_type
from normserve.client.deadlines import check_timeout
from normserve.client.http.async_connection_pool import AsyncConnectionPool
from normserve.client.http.connection_pool import ConnectionPool
from normserve.client.http.direct_transport import AsyncDirectTransport, DirectTransport, RequestEncoder
from normserve.client.http.httpx_transport import AsyncHttpxTransport, HttpxTransport
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import TlsSettings
from normserve.client.local.async_connection import AsyncLocalTransport
from normserve.client.local.connection import LocalTransport
from normserve.client.transport import AsyncCallTransport, CallTransport

# How long an idle connection is kept, as httpx keeps them.
_KEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The validated constructor arguments of a client.

    Attributes:
        url: the server's URL.
        address: the parsed URL.
        api_key: sent as a bearer token; None sends no key.
        timeout_s: seconds that a call may take in total; None is without limit.
        max_connections: requests under way at once.
        verify: httpx's argument of that name, for https.
    """

    url: str
    address: ServerAddress
    api_key: str | None
    timeout_s: float | None
    max_connections: int
    verify: ssl.SSLContext | bool

    @classmethod
    def from_arguments(
        cls,
        url: str,
        api_key: str | None,
        timeout_s: float | None,
        max_connections: int,
        verify: ssl.SSLContext | str | bool,
        certificate: str | tuple[str, str] | None,
    ) -> "ClientOptions":
        """Validate a client's arguments.

        Raises:
            TypeError, ValueError: an argument is of another type, or none that can be used.
        """
        check_type("url", url, str, "a str")
        check_type("api_key", api_key, (str, None), "a str or None")
        check_type("verify", verify, (bool, str, ssl.SSLContext), "a bool, a str or an SSLContext")
        check_type("certificate", certificate, (str, tuple, None), "a str, a tuple or None")
        check_count("max_connections", max_connections, 1)
        check_timeout(timeout_s)
        address = ServerAddress.parse_url(url)
        if api_key is not None:
            _validate_api_key(api_key)
        return cls(url, address, api_key, timeout_s, max_connections, _make_verify_argument(verify, certificate))

    def format_redacted_repr(self, client: object) -> str:
        """Return the repr of a client: its class and its URL, without the URL's user name and password."""
        url = self.url
        if self.address.socket_path is None:
            url = str(httpx.URL(url).copy_with(userinfo=b""))
        return f"{type(client).__name__}({url!r})"


def _validate_api_key(api_key: str) -> str:
    """Return the key if a header can contain it.

    Raises:
        ValueError: a header cannot contain the key.
    """
    # As part of a header, anything else fails with each request, and with the key in the error's text.
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip() and api_key):
        raise ValueError("the API key must be printable ASCII, without a blank or a line break at its ends")
    return api_key


def _make_verify_argument(
    verify: ssl.SSLContext | str | bool, certificate: str | tuple[str, str] | None
) -> ssl.SSLContext | bool:
    """Make httpx's `verify` argument: paths become an SSLContext, because httpx deprecates them.

    Raises:
        OSError: a file cannot be read; the error names it, as those of `ssl` do not.
    """
    files = certificate if isinstance(certificate, tuple) else (certificate,)
    for path in (verify, *files):
        if isinstance(path, str):
            with Path(path).open("rb"):
                pass
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    if certificate is None:
        return verify
    context = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
    context.load_cert_chain(*((certificate,) if isinstance(certificate, str) else certificate))
    return context


def choose_transport(server: ClientOptions, user_transport: httpx.BaseTransport | None) -> CallTransport:
    """Return the blocking client's transport; `user_transport` is an httpx transport that the caller passed."""
    check_type("transport", user_transport, (httpx.BaseTransport, None), "httpx's BaseTransport or None")
    if server.address.is_shared_memory:
        return LocalTransport(_get_local_socket_path(server, user_transport), server.api_key)
    if user_transport is not None or _needs_httpx(server):
        return HttpxTransport(user_transport, **_make_httpx_options(server))
    sockets = ConnectionPool(server.address, TlsSettings(server.verify), server.max_connections, _KEEP_S)
    return DirectTransport(_make_request_encoder(server), sockets)


def choose_async_transport(
    server: ClientOptions, user_transport: httpx.AsyncBaseTransport | None
) -> AsyncCallTransport:
    """Return the asynchronous client's transport; `user_transport` is an httpx transport that the caller passed."""
    check_type("transport", user_transport, (httpx.AsyncBaseTransport, None), "httpx's AsyncBaseTransport or None")
    if server.address.is_shared_memory:
        return AsyncLocalTransport(_get_local_socket_path(server, user_transport), server.api_key)
    if user_transport is not None or _needs_httpx(server):
        return AsyncHttpxTransport(user_transport, **_make_httpx_options(server))
    sockets = AsyncConnectionPool(server.address, TlsSettings(server.verify), server.max_connections, _KEEP_S)
    return AsyncDirectTransport(_make_request_encoder(server), sockets)


def _get_local_socket_path(server: ClientOptions, user_transport: object) -> str:
    """Return the path of the Unix socket for clients that share memory with the server.

    Raises:
        ValueError: the caller passed an httpx transport, which cannot be used with shared memory.
    """
    if user_transport is not None:
        raise ValueError("a URL unix://PATH takes no transport of httpx's")
    assert server.address.socket_path is not None
    return server.address.socket_path


def _make_request_encoder(server: ClientOptions) -> RequestEncoder:
    """Make the encoder of requests to the server.  Requests carry the credentials in the URL if there are any,
    otherwise the API key.
    """
    address, userinfo = server.address, ""
    if address.socket_path is None:
        url = httpx.URL(server.url)
        userinfo = f"{url.username}:{url.password}" if url.userinfo else ""
    return RequestEncoder(address, server.api_key, userinfo)


def _needs_httpx(server: ClientOptions) -> bool:
    """Return whether httpx must send the requests: the server is behind a configured proxy, or this is Windows."""
    if server.address.socket_path is not None:
        return False
    if sys.platform == "win32":
        return True
    if not urllib.request.getproxies():
        return False
    with httpx.Client(verify=False) as client:
        return client._transport_for_url(httpx.URL(server.url)) is not client._transport


def _make_httpx_options(server: ClientOptions) -> dict[str, Any]:
    """Return the options of the httpx client for this server.

    Raises:
        ValueError: the URL names a Unix socket, which is not combined with an httpx transport.
    """
    if server.address.socket_path is not None:
        raise ValueError("a URL that names a socket takes no transport of httpx's")
    # Compression would cost more time than the bytes that it saves: floats hardly shrink.
    headers = {"accept-encoding": "identity"}
    if server.api_key is not None:
        headers["authorization"] = f"Bearer {server.api_key}"
    most = server.max_connections
    return {
        "base_url": server.url,
        "headers": headers,
        "limits": httpx.Limits(max_connections=most, max_keepalive_connections=most),
        "verify": server.verify,
    }
