"""An HTTP client with unusual functions: it sends on a schedule, waits for 100 Continue, and disconnects early."""

import asyncio
import socket
from dataclasses import dataclass

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class WireResponse:
    """A response: status, body (valid until the next one), and whether the connection can be used again."""

    status: int
    body: bytearray
    is_reusable: bool


class RawConnection:
    """One connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # New memory for each response would take longer than the response.
        self._body = bytearray()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, port: int) -> "RawConnection":
        """Connect to a port of this machine."""
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        return cls(made)

    async def send_bytes(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            # One system call continues as long as the server reads, and would delay the timed requests.
            await self._loop.sock_sendall(self._socket, memoryview(data)[start : start + _PIECE_BYTES])
            await asyncio.sleep(0)

    async def exchange(self, head: bytes, body: bytes, *, waits_for_leave: bool) -> WireResponse:
        """One request and its response; the body is not sent if the server refuses the request before."""
        if waits_for_leave:
            await self.send_bytes(head + b"Expect: 100-continue\r\n\r\n")
            first = await self.receive_response()
            if first.status != 100:
                return first
            await self.send_bytes(body)
        else:
            await self.send_bytes(head + b"\r\n")
            await self.send_bytes(body)
        return await self.receive_response()

    async def receive_response(self) -> WireResponse:
        """Receive the next response completely."""
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            piece = await self._loop.sock_recv(self._socket, 65536)
            if not piece:
                raise ConnectionResetError("the server closed the connection")
            received += piece
        head = bytes(received[:end]).lower()
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        if length and len(self._body) != length:
            self._body = bytearray(length)
        body = self._body if length else bytearray()
        body[: len(received) - end - 4] = received[end + 4 :]
        await self._receive_into(memoryview(body)[len(received) - end - 4 :])
        return WireResponse(int(head.split(b" ")[1]), body, b"\r\nconnection: close" not in head)

    async def receive_bytes(self, nbytes: int) -> None:
        """Receive `nbytes` of any data."""
        await self._receive_into(memoryview(bytearray(nbytes)))

    def close(self) -> None:
        """Disconnect at once."""
        self._socket.close()

    async def _receive_into(self, memory: memoryview) -> None:
        while len(memory):
            got = await self._loop.sock_recv_into(self._socket, memory[:_PIECE_BYTES])
            if not got:
                raise ConnectionResetError("the server closed the connection")
            memory = memory[got:]
