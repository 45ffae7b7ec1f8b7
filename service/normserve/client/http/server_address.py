"""The address of a server, parsed from its URL."""

import re
from dataclasses import dataclass

import httpx

_UNIX = "http+unix://"
_SHARED = "unix://"
_PORTS = {"http": 80, "https": 443}

#: The accepted forms of a URL, for messages.
FORMS = "http://HOST:PORT, https://HOST:PORT, http+unix://PATH or unix://PATH"

# A URL without its scheme; nothing that could be a password.
_BARE = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server, parsed from the URL that was given to a client.

    Attributes:
        host, port: of the socket; "localhost" and 0 for a Unix domain socket.
        is_tls: whether the scheme is https.
        prefix: the path of the URL, which precedes the path of every request.
        query: the query of the URL, which is appended to that of every request.
        socket_path: of a Unix domain socket; None is TCP.
        is_shared_memory: the socket speaks the protocol of clients that share memory with the server, not
            HTTP.
    """

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    query: str = ""
    socket_path: str | None = None
    is_shared_memory: bool = False

    @classmethod
    def parse_url(cls, url: str) -> "ServerAddress":
        """Parse a URL.

        Raises:
            ValueError: it is none of `FORMS`; the text does not repeat it, since it may hold a password.
        """
        for scheme in (_UNIX, _SHARED):
            if url.startswith(scheme):
                path = url.removeprefix(scheme)
                if not path.isprintable() or not path.strip("/"):
                    raise ValueError(f"the URL must be {FORMS}")
                return cls("localhost", 0, socket_path=path, is_shared_memory=scheme == _SHARED)
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in _PORTS or not parsed.host:
            missing = f"; http://{url} may be meant" if _BARE.fullmatch(url) else ""
            raise ValueError(f"the URL must be {FORMS}{missing}")
        # An address with another port would be that of its remainder by 65536.
        if parsed.port is not None and not 0 < parsed.port < 2**16:
            raise ValueError(f"the URL must be {FORMS}, with a PORT from 1 to 65535")
        prefix = parsed.raw_path.partition(b"?")[0].decode("ascii").rstrip("/")
        host, port = parsed.raw_host.decode("ascii"), parsed.port or _PORTS[parsed.scheme]
        return cls(host, port, parsed.scheme == "https", prefix, parsed.query.decode("ascii"))

    @property
    def host_header(self) -> str:
        """The value of the Host header, with the port unless it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == _PORTS["https" if self.is_tls else "http"]
        return host if is_usual or self.socket_path is not None else f"{host}:{self.port}"

    @property
    def display_name(self) -> str:
        """The address for messages: HOST:PORT or the socket's path, without secrets."""
        return self.socket_path if self.socket_path is not None else f"{self.host}:{self.port}"

    def make_target(self, path: str) -> str:
        """Return the target of a request line.  It is the server URL's path, then `path`, then the server URL's
        query.  It is at least /.

        Args: path: relative to the server's URL; it may have a query.
        """
        if not self.prefix:
            path = path or "/"
        if self.query:
            path += ("&" if "?" in path else "?") + self.query
        return self.prefix + path
