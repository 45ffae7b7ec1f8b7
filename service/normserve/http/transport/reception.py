"""The reception of a request's body into memory."""

import asyncio
import copy
import time
from collections.abc import Callable, Iterable

from normserve.errors import NormserveError, RequestTimeoutError
from normserve.http.transport.pace import SlowTransferMonitor, TransferProgress


class IncomingBody:
    """Moves a body from the connection, which has the bytes, to the route, which has memory for them.

    A body that is not requested here stays with uvicorn, as ASGI applications expect.

    Attributes:
        announced: its length in bytes; None when it is chunked, 0 when there is none.
        began: when the header was complete, by `time.perf_counter`.
        received: number of bytes in the route's memory.
        is_complete: its last byte has arrived.
        is_filling: received bytes belong to `room` and `append` here, not to uvicorn.
    """

    def __init__(self, announced: int | None, begin: Callable[[], bytearray]) -> None:
        """Args: begin: starts to receive the body, and returns the bytes that were already received."""
        self.announced = announced
        self.began = time.perf_counter()
        self.received = 0
        self.is_complete = False
        self.is_filling = False
        self._ended = self.began
        self._begin = begin
        self._memory = memoryview(b"")
        self._make_room: Callable[[int], memoryview] | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._failure: NormserveError | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the header to the last byte."""
        return self._ended - self.began

    @property
    def is_cut_off(self) -> bool:
        """Whether the rest will not arrive, or is not wanted."""
        return self._failure is not None

    def require_open(self) -> None:
        """Raises: NormserveError: the error of `fail`, if it was called."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    async def into(
        self,
        make_room: Callable[[int], memoryview],
        *,
        pause_s: float,
        total_s: float,
        min_bytes_per_s: float = 0.0,
        grace_s: float = 0.0,
    ) -> memoryview:
        """Receive the whole body.

        A body that arrived in one piece with its header is returned in place, without a call of `make_room`.

        Args:
            make_room: allocates memory of at least this many bytes; called again when a chunked body outgrows it.
                It may raise any error.
            pause_s: longest pause of the client.
            total_s: longest time for the whole body.
            min_bytes_per_s: minimum mean rate, after `grace_s`; 0 for none.

        Raises:
            RequestTimeoutError: the client was too slow.
            ClientLeftError: the client disconnected.
            NormserveError: what `fail` was called with.
        """
        self.require_open()
        early = self._begin()
        if self.is_complete:
            self.received = len(early)
            return memoryview(early)
        self._make_room = make_room
        if self.announced is not None:
            self._memory = make_room(self.announced)
        self.is_filling = True
        try:
            self._take(early)
            pace = TransferProgress(time.perf_counter(), pause_s, total_s, min_bytes_per_s, grace_s)
            await self._completion(pace)
            return self._memory[: self.received]
        finally:
            self._let_go()

    def room(self) -> memoryview:
        """The memory for the next bytes of an announced body."""
        return self._memory[self.received : self.announced]

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written to `room`."""
        self.received += nbytes

    def append(self, data: bytes) -> None:
        """Add the next piece of a chunked body."""
        try:
            self._take(data)
        except NormserveError as error:
            self.fail(error)

    def complete(self) -> None:
        """The last byte has arrived."""
        self.is_complete = True
        self._ended = time.perf_counter()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def fail(self, error: NormserveError) -> None:
        """The rest will not arrive, or is not wanted: later bytes go to uvicorn again."""
        self.is_filling = False
        # A copy that is never raised: a traceback would hold the frame that waits for this body.
        self._failure = copy.copy(error)
        if not self.is_complete:
            # Other requests may wait for this memory.  A complete body belongs to the route, which has not run yet.
            self._memory = memoryview(b"")
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(error)

    def _take(self, data: bytes | bytearray) -> None:
        if not data:
            return
        end = self.received + len(data)
        if end > len(self._memory):
            assert self._make_room is not None
            larger = self._make_room(end)
            larger[: self.received] = self._memory[: self.received]
            self._memory = larger
        self._memory[self.received : end] = data
        self.received = end

    async def _completion(self, pace: TransferProgress) -> None:
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        watch = SlowTransferMonitor(loop, pace, lambda: self.received, self._end)
        try:
            await self._arrival
        finally:
            watch.stop()

    def _end(self, fault: str) -> None:
        self.fail(RequestTimeoutError(fault))

    def _let_go(self) -> None:
        """The slab must not live as long as the connection."""
        self.is_filling = False
        self._memory = memoryview(b"")
        self._make_room = self._arrival = None


def parse_content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """A body's length from its header; the parser has refused contradictory headers."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return None
    return length
