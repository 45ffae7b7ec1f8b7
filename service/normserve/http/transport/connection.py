"""A connection: selects the memory that the next bytes are received into."""

import asyncio
from collections.abc import Callable
from typing import Any

from normserve.http.transport.exchanges import HEAD_BYTES, ConnectionPolicy
from normserve.http.transport.http import HttpParserProtocol
from normserve.http.transport.reception import IncomingBody

# Bytes per read of a chunked or an unwanted body.
_PIECE_BYTES = 256 * 1024
# Chunks of one byte take a microsecond each; all clients wait while those of one read are decoded.
_TINY_CHUNKS_BYTES = 32 * 1024


class HttpConnection(asyncio.BufferedProtocol):
    """Receives into the memory of a request's body, else into scratch memory that the parser reads.

    An idle connection owns no memory: between `get_buffer` and `buffer_updated` the event loop does nothing else,
    so all connections of a loop share the scratch memory.

    uvicorn's protocol is an attribute and not a base class, because an event loop passes `bytes` to every
    `asyncio.Protocol`.

    Attributes:
        on_lost: called when the connection has ended.
    """

    def __init__(self, manners: ConnectionPolicy, scratch: memoryview, **of_uvicorn: Any) -> None:
        self._http = HttpParserProtocol(manners, **of_uvicorn)
        self._scratch = scratch
        self._filling: IncomingBody | None = None
        self.on_lost: Callable[[], None] | None = None

    def admit(self, address: str, beyond: str | None) -> float:
        """Admit the connection, before it is made; return the time for its handshake.

        Args:
            address: of the client, as the limits of connections have it.
            beyond: the limit that it exceeds: it takes the place of an idle one, or else is for a probe only.
        """
        return self._http.admit(address, beyond)

    def get_buffer(self, sizehint: int) -> memoryview:
        http = self._http
        self._filling = http.filling
        if self._filling is not None:
            return self._filling.room()
        if http.unparsed:
            return self._scratch[: http.unparsed]
        if http.chunks is not None:
            return self._scratch[: max(_TINY_CHUNKS_BYTES, http.chunks.remaining)]
        return self._scratch[:HEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._filling is not None:
            self._filling = None
            self._http.filled(nbytes)
        else:
            self._http.data_received(self._scratch[:nbytes])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def eof_received(self) -> bool:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


def make_connection_factory(manners: ConnectionPolicy) -> Callable[..., HttpConnection]:
    """The factory that uvicorn calls for each accepted connection."""
    scratch = memoryview(bytearray(_PIECE_BYTES))

    def make_connection(**of_uvicorn: Any) -> HttpConnection:
        return HttpConnection(manners, scratch, **of_uvicorn)

    return make_connection
