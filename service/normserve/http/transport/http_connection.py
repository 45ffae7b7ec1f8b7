"""A connection, which selects the memory for the next received bytes."""

import asyncio
from collections.abc import Callable
from typing import Any

from normserve.http.transport.exchange_protocol import HEAD_BYTES, ConnectionPolicy
from normserve.http.transport.http_parser_protocol import HttpParserProtocol
from normserve.http.transport.incoming_body import IncomingBody

# Bytes per read of a chunked or an unwanted body.
_PIECE_BYTES = 256 * 1024
# Chunks of one byte take a microsecond each; all clients wait while the chunks of a read are decoded.
_TINY_CHUNKS_BYTES = 32 * 1024


class HttpConnection(asyncio.BufferedProtocol):
    """A connection that receives bodies directly into their slabs, and other bytes into scratch memory.

    An idle connection owns no memory: between `get_buffer` and `buffer_updated` the event loop does
    nothing else, so all connections of a loop share the scratch memory.

    uvicorn's protocol is an attribute and not a base class, because an event loop passes `bytes` to every
    `asyncio.Protocol`.

    Attributes:
        on_connection_lost: called when the connection has ended.
    """

    def __init__(self, policy: ConnectionPolicy, scratch: memoryview, **of_uvicorn: Any) -> None:
        self._protocol = HttpParserProtocol(policy, **of_uvicorn)
        self._scratch = scratch
        self._direct_body: IncomingBody | None = None
        self.on_connection_lost: Callable[[], None] | None = None

    def admit(self, address: str, exceeded_limit: str | None) -> float:
        """Admit the connection, before `connection_made`; return how many seconds its TLS handshake may take.

        Args:
            address: the client's address, in the form that the limits of connections use.
            exceeded_limit: the limit that the connection exceeds; None within all limits.  An idle connection is
                then closed in its place, or this one may send only one probe.
        """
        return self._protocol.admit(address, exceeded_limit)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next received bytes: that of the body, or scratch memory."""
        http = self._protocol
        self._direct_body = http.direct_body
        if self._direct_body is not None:
            return self._direct_body.get_free_buffer()
        if http.remaining_body_bytes:
            return self._scratch[: http.remaining_body_bytes]
        if http.chunked_decoder is not None:
            return self._scratch[: max(_TINY_CHUNKS_BYTES, http.chunked_decoder.remaining_chunk_bytes)]
        return self._scratch[:HEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that were received into the body's memory, or process those in scratch memory."""
        if self._direct_body is not None:
            self._direct_body = None
            self._protocol.count_direct_bytes(nbytes)
        else:
            self._protocol.data_received(self._scratch[:nbytes])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        if self.on_connection_lost is not None:
            self.on_connection_lost()

    def eof_received(self) -> bool:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def make_connection_factory(policy: ConnectionPolicy) -> Callable[..., HttpConnection]:
    """Make the factory that uvicorn calls for each accepted connection."""
    scratch = memoryview(bytearray(_PIECE_BYTES))

    def make_connection(**of_uvicorn: Any) -> HttpConnection:
        return HttpConnection(policy, scratch, **of_uvicorn)

    return make_connection
