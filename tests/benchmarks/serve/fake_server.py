"""A server of a few lines that answers as it is told."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import torch

from benchmarks.serve.clients.checked_requests import COLS, encode_npy, make_parameters

PARAMETERS = make_parameters()


def normalised(body: bytes) -> bytes:
    x = torch.from_numpy(np.frombuffer(body[128:], np.float32).reshape(-1, COLS).copy())
    weight, bias = (torch.from_numpy(PARAMETERS[name]) for name in ("weight", "bias"))
    return encode_npy(torch.nn.functional.layer_norm(x, (COLS,), weight, bias).numpy())


def answer(status: int, body: bytes, *lines: str) -> bytes:
    head = "\r\n".join((f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines, "", ""))
    return head.encode() + body


class Server:
    """Reads requests and answers as it is told: 200 with `reply`, or 429 beyond so many."""

    def __init__(self, reply: Callable[[bytes], bytes], admits: int = 10**9) -> None:
        self._reply, self._admits = reply, admits
        self.bodies = 0
        self.connections: list[asyncio.Task[None] | None] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not self._admits:
                    writer.write(answer(429, b"no", "Connection: close"))
                    break
                self._admits -= 1
                if b"expect: 100-continue" in head:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.bodies += 1
                writer.write(answer(200, self._reply(body)))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def against(server: Server, play: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        try:
            await play(listening.sockets[0].getsockname()[1])
        finally:
            listening.close()
            await listening.wait_closed()
        await asyncio.gather(*filter(None, server.connections))

    asyncio.run(run())
