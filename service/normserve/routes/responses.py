"""Responses made of buffers that are never joined."""

import asyncio
import contextlib
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Up to here one write with a copy is cheaper than two without.
_JOIN_BYTES = 16 * 1024


class BuffersResponse(Response):
    """A body in pieces, sent as they are; complete when the transport has taken the last of them."""

    def __init__(
        self, buffers: Sequence[bytes | memoryview], media_type: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.status_code = 200
        self.background = None
        self.nbytes = sum(len(buffer) for buffer in buffers)
        self._buffers = [b"".join(buffers)] if self.nbytes <= _JOIN_BYTES else buffers
        every = [("content-type", media_type), ("content-length", str(self.nbytes)), *headers]
        self.raw_headers = [(name.encode(), value.encode()) for name, value in every]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for buffer in self._buffers:
            await send({"type": "http.response.body", "body": buffer, "more_body": True})
        if self.nbytes > _JOIN_BYTES:
            # This one waits until the buffers before it have drained.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await _notice_departure(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _notice_departure(receive: Receive) -> None:
    """Let the layers around see the disconnection, if there was one; once all is sent nothing shows it any more."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await receive()
