"""Where a server listens, as its URL says."""

from dataclasses import dataclass, replace

import httpx

_UNIX = "http+unix://"
_PORTS = {"http": 80, "https": 443}

#: What a URL may be, as a message says it.
FORMS = "http://HOST:PORT, https://HOST:PORT or http+unix://PATH"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        host, port: of the socket; "localhost" and 0 of one in the file system.
        tls: whether it is https.
        prefix: the path that stands before every request's.
        query: what stands behind it.
        socket_path: of a Unix domain socket; None is TCP.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    query: str = ""
    socket_path: str | None = None

    @classmethod
    def of(cls, url: str) -> "Address":
        """Read a URL.

        Raises:
            ValueError: it is none of `FORMS`; the text does not repeat it, since it may hold a password.
        """
        if url.startswith(_UNIX):
            path = url.removeprefix(_UNIX)
            if not path.isprintable() or not path.strip("/"):
                raise ValueError(f"the URL must be {FORMS}")
            return cls("localhost", 0, socket_path=path)
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in _PORTS or not parsed.host:
            raise ValueError(f"the URL must be {FORMS}")
        prefix = parsed.raw_path.partition(b"?")[0].decode("ascii").rstrip("/")
        return replace(cls.of_request(parsed), prefix=prefix, query=parsed.query.decode("ascii"))

    @classmethod
    def of_request(cls, url: httpx.URL) -> "Address":
        """Where httpx sends a request for a URL with a host."""
        tls = url.scheme == "https"
        return cls(url.raw_host.decode("ascii"), url.port or _PORTS["https" if tls else "http"], tls)

    @property
    def host_header(self) -> str:
        """As the Host header has it: with a port that does not go without saying."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == _PORTS["https" if self.tls else "http"]
        return host if is_usual or self.socket_path is not None else f"{host}:{self.port}"

    def target(self, path: str) -> str:
        """What a request line asks for; `path` is below the server's URL, with its query."""
        if self.query:
            path += ("&" if "?" in path else "?") + self.query
        return self.prefix + path
