"""HTTP over a connection: uvicorn's httptools protocol, with the limits and the manners that it lacks."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from normserve.errors import HeadersTooLargeError, MalformedHttpError, NormserveError, RequestTimeoutError
from normserve.http_errors import problem

_MAX_HEADER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection waits for its client.

    Attributes:
        header_s: for a complete header, from its first byte or from the connection's start.
        send_s: for a client that reads nothing of its response.
    """

    header_s: float
    send_s: float


class NormserveProtocol(HttpToolsProtocol):
    """Answers malformed HTTP with problem documents, and bounds headers and slow clients."""

    def __init__(
        self,
        *,
        patience: Patience,
        on_refusal: Callable[[NormserveError], None],
        **of_uvicorn: Any,
    ) -> None:
        super().__init__(**of_uvicorn)
        self._on_refusal = on_refusal
        self._patience = patience
        self._header_bytes = 0
        self._reading_header = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._header_timer, self._send_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._reading_header:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._reading_header and self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse_long_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_header = True
        self._await_header()

    def on_headers_complete(self) -> None:
        self._reading_header = False
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > _MAX_HEADER_BYTES:
            self._refuse_long_header()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError("the request is no well-formed HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        # Bytes that nobody fetched all this time will not be fetched: closing would wait for them forever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _await_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self.loop.call_later(self._patience.header_s, self._header_is_late)

    def _header_is_late(self) -> None:
        if self._header_bytes:
            self._refuse(RequestTimeoutError("the header was not complete in time"))
        else:
            self.transport.close()

    def _refuse_long_header(self) -> None:
        self._refuse(HeadersTooLargeError(f"the header must be at most {_MAX_HEADER_BYTES} bytes"))

    def _refuse(self, error: NormserveError) -> None:
        """Answer what never became a request, and close; an answer that has begun is cut off instead."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._on_refusal(error)
            self.transport.write(_rendered(error))
        self.transport.close()

    def _watch_sending(self, unsent_before: int) -> None:
        self._send_timer = self.loop.call_later(self._patience.send_s, self._check_sending, unsent_before)

    def _check_sending(self, unsent_before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= unsent_before:
            self.transport.abort()
        else:
            self._watch_sending(unsent)


def _rendered(error: NormserveError) -> bytes:
    request_id = secrets.token_hex(16)
    status, headers, body = problem(error, request_id)
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    lines.append(b"x-request-id: " + request_id.encode() + b"\r\n")
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", body])
