"""One HTTP/1.1 connection with blocking sockets.

http.client and httpx spend more time on a small request than the server that is to be loaded; here it is some
twenty microseconds.  A body is sent from where it lies and an answer received to where it stays, one copy each, in
the kernel.  What a load test needs of HTTP and no more: one request at a time, answers with a Content-Length.
"""

import functools
import select
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from normserve.client import ConnectionFailedError, RequestTimeoutError, UnexpectedAnswerError
from normserve.client.protocol import Answer

_HEAD_BYTES = 64 * 1024
# Between pieces it is looked whether an answer came early: a refusal, which makes the rest needless.
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        host, port: of the socket.
        tls: whether it is https.
        prefix: the path that stands before every request's.
        query: what stands behind it.
    """

    host: str
    port: int
    tls: bool
    prefix: str
    query: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Read a URL.

        Raises:
            ValueError: it is none of http or https with a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), parts.query)

    @property
    def host_header(self) -> str:
        """As the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def request_head(
    address: Address, method: str, target: str, headers: Mapping[str, str], content_length: int
) -> bytes:
    """The bytes before a body; `target` is the path, with its query, below the server's URL."""
    if address.query:
        target += ("&" if "?" in target else "?") + address.query
    lines = [f"{method} {address.prefix}{target} HTTP/1.1", f"Host: {address.host_header}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {content_length}", "", ""]).encode("latin-1")


class Connection:
    """Opens itself when it is first used, and again after it broke or was closed."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Args:
        address: where to.
        timeout_s: longest wait for anything to happen.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._early = select.poll()
        self._head = bytearray(_HEAD_BYTES)
        # Memory that was used before is there already; new memory is faulted in page by page.
        self._body = bytearray()

    def exchange(self, head: bytes, parts: Sequence[bytes | memoryview]) -> Answer:
        """Send one request and return its answer, whose body is valid until the next exchange.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
            RequestTimeoutError: nothing happened for too long.
            UnexpectedAnswerError: what came is no answer that this understands.
        """
        # The server may have closed it while nobody asked: then there is its end to read.
        if self._socket is not None and self._early.poll(0):
            self.close()
        try:
            connected = self._socket or self._open()
            sent = self._send(connected, head, parts)
            answer, stays = self._receive(connected)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and not isinstance(error, RequestTimeoutError):
                raise RequestTimeoutError(f"nothing came for {self._timeout_s:g} s") from error
            if isinstance(error, OSError) and not isinstance(error, ConnectionFailedError | RequestTimeoutError):
                raise ConnectionFailedError(str(error) or type(error).__name__) from error
            raise
        if not sent or not stays:
            self.close()
        return answer

    def close(self) -> None:
        """Close it, if it is open."""
        if self._socket is not None:
            self._early.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        address = self._address
        made = socket.create_connection((address.host, address.port), self._timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            made = _certificates().wrap_socket(made, server_hostname=address.host)
        self._socket = made
        self._early.register(made, select.POLLIN)
        return made

    def _send(self, connected: socket.socket, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Return whether all was sent, and not an answer there before."""
        small = head
        for part in parts:
            view = memoryview(part).cast("B")
            if len(small) + len(view) <= _HEAD_BYTES:
                small += view
                continue
            connected.sendall(small)
            small = b""
            for start in range(0, len(view), _PIECE_BYTES):
                if start and self._early.poll(0):
                    return False
                connected.sendall(view[start : start + _PIECE_BYTES])
        if small:
            connected.sendall(small)
        return True

    def _receive(self, connected: socket.socket) -> tuple[Answer, bool]:
        """The answer, and whether the connection stays open behind it."""
        have = 0
        while True:
            end = self._head.find(b"\r\n\r\n", 0, have)
            while end < 0:
                if have == _HEAD_BYTES:
                    raise UnexpectedAnswerError(f"an answer's head must be at most {_HEAD_BYTES} bytes")
                got = connected.recv_into(memoryview(self._head)[have:])
                if not got:
                    raise ConnectionFailedError("the server closed the connection")
                end = self._head.find(b"\r\n\r\n", max(0, have - 3), have + got)
                have += got
            status, headers = _read_head(bytes(self._head[:end]))
            if status >= 200:
                break
            # 100 Continue and its like; the answer follows.
            self._head[: have - end - 4] = self._head[end + 4 : have]
            have -= end + 4
        length = _length(status, headers)
        if len(self._body) < length:
            self._body = bytearray(length)
        body = memoryview(self._body)[:length]
        already = min(have - end - 4, length)
        body[:already] = memoryview(self._head)[end + 4 : end + 4 + already]
        while already < length:
            got = connected.recv_into(body[already:])
            if not got:
                raise ConnectionFailedError("the server closed the connection within its answer")
            already += got
        return Answer(status, headers, body), headers.get("connection", "").lower() != "close"


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading the trusted ones takes longer than a handshake.
    return ssl.create_default_context()


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise UnexpectedAnswerError(f"an answer must begin with HTTP/1.1 and a status, got {first[:40]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(rest[:3]), headers


def _length(status: int, headers: Mapping[str, str]) -> int:
    if status in (204, 304):
        return 0
    length = headers.get("content-length", "")
    if not length.isdecimal():
        raise UnexpectedAnswerError("an answer must have a Content-Length")
    return int(length)
