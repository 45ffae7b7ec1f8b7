"""One HTTP/1.1 connection with blocking sockets.

http.client and httpx spend more time on a small request than the server that is to be loaded; here it is some
twenty microseconds.  A body is sent from where it lies and an answer received to where it stays, one copy each, in
the kernel.  What a load test needs of HTTP and no more: one request at a time, answers with a Content-Length, no
longer than was asked for and in time; anything else is one of the client's errors.
"""

import functools
import re
import select
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from normserve.client import ClientError, ConnectionFailedError, UnexpectedAnswerError
from normserve.client.answers import Answer
from normserve.client.deadlines import Deadline
from normserve.client.reception import Reception, announced_bytes

_HEAD_BYTES = 64 * 1024
# Between pieces it is looked whether an answer came early: a refusal, which makes the rest needless.
_PIECE_BYTES = 2**20
# Without 101: nobody asks for another protocol.
_STATUS = re.compile("10[02-9]|1[1-9][0-9]|[2-9][0-9][0-9]")


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
        timeout_s: how long an exchange may take, from connecting to the last byte of the answer.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._early = select.poll()
        self._head = bytearray(_HEAD_BYTES)
        # Memory that was used before is there already; new memory is faulted in page by page.
        self._body = bytearray()

    def exchange(self, head: bytes, parts: Sequence[bytes | memoryview], most_bytes: int) -> Answer:
        """Send one request and return its answer, whose body is valid until the next exchange.

        Args:
            head, parts: of the request.
            most_bytes: what the body of a successful answer can have; an error's is left out if it is too long.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
            RequestTimeoutError: there was no whole answer in time.
            UnexpectedAnswerError: what came is no answer that this understands, or more than can be one.
        """
        deadline = Deadline(self._timeout_s)
        # The server may have closed it while nobody asked: then there is its end to read.
        if self._socket is not None and self._early.poll(0):
            self.close()
        try:
            connected = self._socket or self._open(deadline)
            sent = self._send(connected, deadline, head, parts)
            answer, stays = self._receive(connected, deadline, most_bytes)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and not isinstance(error, ClientError):
                raise deadline.error() from error
            # A UnicodeError is a host's name of which no query can be made.
            if isinstance(error, OSError | UnicodeError) and not isinstance(error, ClientError):
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

    def _open(self, deadline: Deadline) -> socket.socket:
        made = self._connected(deadline)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._address.tls:
            made.settimeout(_left_s(deadline))
            made = _certificates().wrap_socket(made, server_hostname=self._address.host)
        self._socket = made
        self._early.register(made, select.POLLIN)
        return made

    def _connected(self, deadline: Deadline) -> socket.socket:
        """A socket to the first of the host's addresses that takes it; all of them share the time."""
        failure = OSError("the host has no address")
        for *_, found in socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM):
            try:
                return socket.create_connection((str(found[0]), int(found[1])), _left_s(deadline))
            except OSError as error:
                failure = error
        raise failure

    def _send(
        self, connected: socket.socket, deadline: Deadline, head: bytes, parts: Sequence[bytes | memoryview]
    ) -> bool:
        """Return whether all was sent, and not an answer there before."""
        small = head
        for part in parts:
            view = memoryview(part).cast("B")
            if len(small) + len(view) <= _HEAD_BYTES:
                small += view
                continue
            _send_all(connected, deadline, memoryview(small))
            small = b""
            for start in range(0, len(view), _PIECE_BYTES):
                if start and self._early.poll(0):
                    return False
                _send_all(connected, deadline, view[start : start + _PIECE_BYTES])
        if small:
            _send_all(connected, deadline, memoryview(small))
        return True

    def _receive(self, connected: socket.socket, deadline: Deadline, most_bytes: int) -> tuple[Answer, bool]:
        """The answer, and whether the connection stays open behind it."""
        have = 0
        while True:
            end = self._head.find(b"\r\n\r\n", 0, have)
            while end < 0:
                if have == _HEAD_BYTES:
                    raise UnexpectedAnswerError(f"an answer's head must be at most {_HEAD_BYTES} bytes")
                got = _receive_some(connected, deadline, memoryview(self._head)[have:])
                end = self._head.find(b"\r\n\r\n", max(0, have - 3), have + got)
                have += got
            status, headers, stays = _read_head(bytes(self._head[:end]))
            if status >= 200:
                break
            # 100 Continue and its like; the answer follows.
            self._head[: have - end - 4] = self._head[end + 4 : have]
            have -= end + 4
        length = _length(status, headers)
        # What is as it should be needs no second look.
        is_plain = status < 400 and length <= most_bytes and "content-encoding" not in headers
        if not is_plain and not Reception(status, headers, most_bytes).is_wanted:
            return Answer(status, headers, memoryview(b"")), False
        if len(self._body) < length:
            self._body = bytearray(length)
        body = memoryview(self._body)[:length]
        already = min(have - end - 4, length)
        body[:already] = memoryview(self._head)[end + 4 : end + 4 + already]
        while already < length:
            already += _receive_some(connected, deadline, body[already:])
        return Answer(status, headers, body), stays


def _left_s(deadline: Deadline) -> float | None:
    """Seconds to wait at most.

    Raises:
        RequestTimeoutError: there are none.
    """
    left_s = deadline.left_s()
    if left_s is not None and left_s <= 0:
        raise deadline.error()
    return left_s


def _send_all(connected: socket.socket, deadline: Deadline, view: memoryview) -> None:
    while view:
        connected.settimeout(_left_s(deadline))
        view = view[connected.send(view) :]


def _receive_some(connected: socket.socket, deadline: Deadline, into: memoryview) -> int:
    connected.settimeout(_left_s(deadline))
    got = connected.recv_into(into)
    if not got:
        raise ConnectionFailedError("the server closed the connection before its answer was whole")
    return got


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading the trusted ones takes longer than a handshake.
    return ssl.create_default_context()


def _read_head(head: bytes) -> tuple[int, dict[str, str], bool]:
    """Status, headers, and whether the server means to keep the connection."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, _ = rest.partition(" ")
    if version not in ("HTTP/1.0", "HTTP/1.1") or not _STATUS.fullmatch(status):
        raise UnexpectedAnswerError("an answer must begin with HTTP/1.1 and a status, it does not")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if len(headers) < len(lines) and sum(line.lower().startswith("content-length:") for line in lines) > 1:
        raise UnexpectedAnswerError("an answer must have one Content-Length")
    connection = headers.get("connection", "").lower()
    return int(status), headers, connection == "keep-alive" if version == "HTTP/1.0" else "close" not in connection


def _length(status: int, headers: Mapping[str, str]) -> int:
    if status in (204, 304):
        return 0
    length = announced_bytes(headers)
    if length is None or "transfer-encoding" in headers:
        raise UnexpectedAnswerError("an answer must have a Content-Length, and no Transfer-Encoding")
    return length
