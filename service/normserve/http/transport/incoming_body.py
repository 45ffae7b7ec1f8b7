"""The reception of a request's body into memory."""

import asyncio
import copy
import time
from collections.abc import Callable, Iterable

from normserve.errors import NormserveError, RequestTimeoutError
from normserve.http.transport.transfer_progress import SlowTransferMonitor, TransferProgress


class IncomingBody:
    """The reception of a request's body: the connection writes bytes to memory that the handler allocates.

    A handler that does not call `receive_into` gets the body as ASGI messages.

    Attributes:
        content_length: the body's length in bytes; None when it is chunked, 0 when there is none.
        began_at: when the header was complete, by `time.perf_counter`.
        received_bytes: number of bytes in the handler's memory.
        is_complete: whether the last byte has been received.
        is_receiving: whether received bytes belong to `get_free_buffer` and `append_part` here, not to
            uvicorn.
        is_relayed: whether another process receives the body.
    """

    is_relayed = False

    def __init__(self, announced: int | None, begin: Callable[[], bytearray]) -> None:
        """Args: begin: starts to receive the body, and returns the bytes that were already received."""
        self.content_length = announced
        self.began_at = time.perf_counter()
        self.received_bytes = 0
        self.is_complete = False
        self.is_receiving = False
        self._ended_at = self.began_at
        self._begin_receiving = begin
        self._memory = memoryview(b"")
        self._allocate: Callable[[int], memoryview] | None = None
        self._completion: asyncio.Future[None] | None = None
        self._failure: NormserveError | None = None

    @property
    def receive_s(self) -> float:
        """The seconds from the end of the header to the last byte of the body."""
        return self._ended_at - self.began_at

    @property
    def is_aborted(self) -> bool:
        """Whether the reception was aborted, so that the body stays incomplete or unused."""
        return self._failure is not None

    def require_not_aborted(self) -> None:
        """Raises: NormserveError: the error of `abort`, if it was called."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    async def receive_into(
        self,
        make_room: Callable[[int], memoryview],
        *,
        pause_s: float,
        total_s: float,
        min_bytes_per_s: float = 0.0,
        grace_s: float = 0.0,
    ) -> memoryview:
        """Receive the complete body into memory that `make_room` allocates; return a view of its bytes.

        A body that was received in one piece with its header is returned without a copy and
        without a call of `make_room`.

        Args:
            make_room: allocates memory of at least this many bytes; called again when a chunked body
                outgrows it.  It may raise any error.
            pause_s: longest pause of the client.
            total_s: longest time for the complete body.
            min_bytes_per_s: minimum mean rate, after `grace_s`; 0 for none.

        Raises:
            RequestTimeoutError: the client was too slow.
            ClientLeftError: the client disconnected.
            NormserveError: the error that `abort` was called with.
        """
        self.require_not_aborted()
        early = self._begin_receiving()
        if self.is_complete:
            self.received_bytes = len(early)
            return memoryview(early)
        self._allocate = make_room
        if self.content_length is not None:
            self._memory = make_room(self.content_length)
        self.is_receiving = True
        try:
            self._store(early)
            pace = TransferProgress(time.perf_counter(), pause_s, total_s, min_bytes_per_s, grace_s)
            await self._wait_complete(pace)
            return self._memory[: self.received_bytes]
        finally:
            self._release_memory()

    def get_free_buffer(self) -> memoryview:
        """Return the memory for the next bytes of an announced body."""
        return self._memory[self.received_bytes : self.content_length]

    def count_received(self, nbytes: int) -> None:
        """Count bytes that were written to `get_free_buffer`."""
        self.received_bytes += nbytes

    def append_part(self, data: bytes) -> None:
        """Append received bytes to the body; abort the reception if there is no memory for them."""
        try:
            self._store(data)
        except NormserveError as error:
            self.abort(error)

    def mark_complete(self) -> None:
        """Mark the body as complete, and resume the handler that waits for it."""
        self.is_complete = True
        self._ended_at = time.perf_counter()
        if self._completion is not None and not self._completion.done():
            self._completion.set_result(None)

    def abort(self, error: NormserveError) -> None:
        """Abort the reception; the waiting handler gets `error`, and later bytes of the body go to uvicorn."""
        self.is_receiving = False
        # A copy that is never raised: a traceback would hold the frame that waits for this body.
        self._failure = copy.copy(error)
        if not self.is_complete:
            # Other requests may wait for this memory.  A complete body belongs to the route, which has not run yet.
            self._memory = memoryview(b"")
        if self._completion is not None and not self._completion.done():
            self._completion.set_exception(error)

    def _store(self, data: bytes | bytearray) -> None:
        """Append bytes to the body's memory, which is replaced by a larger one if it is too short."""
        if not data:
            return
        end = self.received_bytes + len(data)
        if end > len(self._memory):
            assert self._allocate is not None
            larger = self._allocate(end)
            larger[: self.received_bytes] = self._memory[: self.received_bytes]
            self._memory = larger
        self._memory[self.received_bytes : end] = data
        self.received_bytes = end

    async def _wait_complete(self, pace: TransferProgress) -> None:
        """Wait until the body is complete; abort the reception if the client is too slow.

        Raises:
            NormserveError: the error that the reception was aborted with.
        """
        loop = asyncio.get_running_loop()
        self._completion = loop.create_future()
        watch = SlowTransferMonitor(loop, pace, lambda: self.received_bytes, self._abort_slow)
        try:
            await self._completion
        finally:
            watch.stop()

    def _abort_slow(self, fault: str) -> None:
        self.abort(RequestTimeoutError(fault))

    def _release_memory(self) -> None:
        """Drop the reference to the body's slab, which must not live as long as the connection."""
        self.is_receiving = False
        self._memory = memoryview(b"")
        self._allocate = self._completion = None


def find_body_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the length of a body in bytes from its headers; None if the body is chunked.

    The length is 0 if no header announces a body.  The server below has refused contradictory headers.
    """
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return None
    return length
