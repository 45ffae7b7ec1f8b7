"""Responses made of buffers that are never joined."""

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Up to here one message with a copy is cheaper than several without.
_JOIN_BYTES = 16 * 1024


class BuffersResponse(Response):
    """A body in pieces, sent as they are; complete when the kernel has taken the last of them."""

    def __init__(
        self, buffers: Sequence[bytes | memoryview], media_type: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self.status_code = 200
        self.background = None
        nbytes = sum(len(buffer) for buffer in buffers)
        self._is_small = nbytes <= _JOIN_BYTES
        self._buffers = [b"".join(buffers)] if self._is_small else buffers
        self.raw_headers = [(b"content-type", media_type), (b"content-length", b"%d" % nbytes), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        buffers, self._buffers = self._buffers, ()
        for buffer in buffers:
            await send({"type": "http.response.body", "body": buffer, "more_body": not self._is_small})
        if self._is_small:
            return
        # This one waits until the kernel has the buffers before it.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
