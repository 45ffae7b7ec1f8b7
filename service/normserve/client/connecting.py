"""Which transport takes a client's calls: its URL says which."""

import ssl
from dataclasses import dataclass
from typing import Any

import httpx

from normserve.client.deadlines import check_timeout
from normserve.client.http.credentials import checked, trust
from normserve.client.http.through_httpx import AsyncHttpxTransport, HttpxTransport
from normserve.client.transport import AsyncTransport, Transport


@dataclass(frozen=True, slots=True)
class Server:
    """A server as a client is told of it, checked.

    Attributes:
        url: where it listens.
        api_key: sent as a bearer token; None is none.
        timeout_s: of a whole call; None is for ever.
        max_connections: requests under way at once.
        verify: of https, as httpx has it.
    """

    url: httpx.URL
    api_key: str | None
    timeout_s: float | None
    max_connections: int
    verify: ssl.SSLContext | bool

    @classmethod
    def told(
        cls,
        url: str,
        api_key: str | None,
        timeout_s: float | None,
        max_connections: int,
        verify: ssl.SSLContext | str | bool,
        certificate: str | tuple[str, str] | None,
    ) -> "Server":
        """Check what a client is told.

        Raises:
            ValueError: the URL, the key or the timeout is none.
        """
        check_timeout(timeout_s)
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        # The message does not repeat it: a URL may hold a password.
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("the URL must be http://HOST:PORT or https://HOST:PORT")
        if api_key is not None:
            checked(api_key)
        return cls(parsed, api_key, timeout_s, max_connections, trust(verify, certificate))

    def shown(self, kind: object) -> str:
        """How a client shows itself: neither its key, nor a password in its URL, nor where it lies in memory."""
        return f"{type(kind).__name__}({str(self.url.copy_with(userinfo=b''))!r})"


def transport_to(server: Server, own: httpx.BaseTransport | None) -> Transport:
    """The blocking client's transport; `own` is one of httpx's that its maker wants used."""
    return HttpxTransport(own, **_options(server))


def async_transport_to(server: Server, own: httpx.AsyncBaseTransport | None) -> AsyncTransport:
    """As `transport_to`, of the asynchronous client."""
    return AsyncHttpxTransport(own, **_options(server))


def _options(server: Server) -> dict[str, Any]:
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
