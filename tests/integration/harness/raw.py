"""HTTP by hand, for what no client library would send."""

import contextlib
import json
import socket


class Answer:
    """A response as it came: status, headers by lower-case name, body."""

    def __init__(self, raw: bytes) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        self.status_code = int(lines[0].split(b" ")[1])
        pairs = [line.partition(b":") for line in lines[1:]]
        self.headers = {name.decode().lower(): value.strip().decode() for name, _, value in pairs}
        length = int(self.headers.get("content-length", 0))
        self.content, self.rest = rest[:length], rest[length:]

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> object:
        return json.loads(self.content)


class Connection(socket.socket):
    """A socket to the server."""

    # The beginning of the next response, which may come with the end of the one before.
    _behind = b""

    def __init__(self, address: tuple[str, int], timeout_s: float = 20) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.settimeout(timeout_s)
        self.connect(address)

    def everything(self) -> bytes:
        """All that comes until the server closes, however it closes."""
        received, self._behind = bytearray(self._behind), b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.recv(65536):
                received += piece
        return bytes(received)

    def answer(self) -> Answer:
        """One response; the connection may stay open."""
        received = bytearray(self._behind)
        while b"\r\n\r\n" not in received:
            piece = self.recv(65536)
            assert piece, f"the server closed after {bytes(received)!r}"
            received += piece
        head = bytes(received).partition(b"\r\n\r\n")[0].lower()
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        expected = len(head) + 4 + (int(lengths[0].split(b":")[1]) if lengths else 0)
        while len(received) < expected:
            piece = self.recv(65536)
            assert piece, "the server closed within a body"
            received += piece
        self._behind = bytes(received[expected:])
        return Answer(bytes(received))


def exchange(address: tuple[str, int], request: bytes) -> Answer:
    """Send bytes and return what comes until the server closes."""
    with Connection(address) as connection:
        connection.sendall(request)
        return Answer(connection.everything())


def answered(address: tuple[str, int], request: bytes) -> Answer:
    """Send bytes and return the first response, after which nobody waits for what the server still would read."""
    with Connection(address) as connection:
        connection.sendall(request)
        return connection.answer()


def head(path: str = "/v1/layer_norm", *lines: str) -> bytes:
    """The start of a POST."""
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode("latin-1")
