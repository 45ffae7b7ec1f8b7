"""Admission of a request by its header, and reception of its body into a slab."""

import asyncio
from dataclasses import dataclass

import numpy as np

from normserve.admission.permits import Permit
from normserve.errors import OverloadedError, TooLargeError, UnsupportedMediaTypeError
from normserve.http.http_exchange import HttpExchange
from normserve.memory.slabs import SlabPool, allocate_plain
from normserve.memory.thread_allocation import make_unretained_on_thread
from normserve.metrics.request_metrics import GRPC_TRANSPORT
from normserve.requests.request_lifecycle import RequestLifecycle

# The first slab of a body of unknown length.
_FIRST_BYTES = 2**20
# Shorter bodies are packed into other memory in any case.
_PACKED_BYTES = 256 * 1024
# Below this, allocating memory takes less time than a hand-over to another thread.
_LONG_BYTES = 2**20
# Bytes per second: a slower body loses its permit if other requests wait for it.
_SLOWEST = 1.0


def require_uncompressed(content_encoding: str) -> None:
    """Raises: UnsupportedMediaTypeError: the body is compressed."""
    if content_encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            f"the body must be uncompressed, without a Content-Encoding, got {content_encoding.strip()[:100]!r}"
        )


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Admits requests and receives their bodies.

    Attributes:
        max_body_bytes: limit of one body.
        max_pause_s, max_total_s: longest pause within a body, and longest time for the complete body.
        min_bytes_per_s, grace_s: minimum mean rate of a body, and the time after which it applies.
    """

    slab_pool: SlabPool
    max_body_bytes: int
    max_pause_s: float
    max_total_s: float
    min_bytes_per_s: float = 0.0
    grace_s: float = 0.0

    async def receive_body_and_mark_in_progress(self, exchange: HttpExchange) -> memoryview:
        """Receive the body of an operation, record how long that took, and mark the request as in progress.

        Once the body is complete, the request counts as in progress, which the stall detector watches.

        Raises:
            NormserveError: the request is not admitted, or its body is not received.
        """
        # The gateway takes no new calls once the server drains.
        is_of_gateway = exchange.record.transport == GRPC_TRANSPORT
        exchange.services.engine.require_ready(is_call_in_progress=is_of_gateway)
        body = await self.admit_and_receive_body(exchange)
        exchange.mark_in_progress()
        reception = exchange.incoming_body
        exchange.record.record_received(reception.receive_s, is_relayed=reception.is_relayed)
        return body

    async def admit_and_receive_body(self, exchange: HttpExchange) -> memoryview:
        """Acquire the permit that admits the request, then receive the body into a slab.  After an error the permit
        is released.

        A permit admits one request, and limits the memory that it uses.

        Raises:
            TooLargeError: the body is longer than allowed; if its length is announced, it is refused unread.
            OverloadedError: there is no permit or no memory, or the permit was revoked for another request.
            RequestTimeoutError: the client was too slow.
            ClientLeftError: the client disconnected.
        """
        reception = exchange.incoming_body
        announced = reception.content_length
        reception.require_not_aborted()
        permit = self.acquire_permit(exchange, announced or 0)
        room = _BodyBuffer(self, permit, announced)
        try:
            if self.slab_pool.source.is_slow:
                await room.allocate_long_slab_on_thread()
            if not reception.is_complete:
                permit.start_receiving(reception, self.compute_due_bytes_per_s(announced or 0))
            body = await reception.receive_into(
                room.allocate,
                pause_s=self.max_pause_s,
                total_s=self.max_total_s,
                min_bytes_per_s=self.min_bytes_per_s,
                grace_s=self.grace_s,
            )
            permit.complete_body()
            if announced is None:
                self.require_body_limit(len(body))
                permit.grow(max(0, len(body) - permit.nbytes))
                body = await room.move_to_pinned_slab(body)
        except BaseException:
            # Sending the error to a client that still sends may take a while, and the traceback holds this frame.
            permit.release()
            room.slab = None
            raise
        return body

    def acquire_permit(self, request: RequestLifecycle, nbytes: int) -> Permit:
        """Acquire the request's permit, which covers the memory of a body of `nbytes`.

        Raises:
            TooLargeError: `nbytes` exceeds the limit of all bodies or of this client.
            OverloadedError: there is no permit.
        """
        self.require_body_limit(nbytes)
        return request.acquire_permit(nbytes)

    def compute_due_bytes_per_s(self, announced: int) -> float:
        """Return the rate below which a body's permit may be revoked: the body would not be complete in time."""
        return max(self.min_bytes_per_s, announced / self.max_total_s, _SLOWEST)

    def require_body_limit(self, nbytes: int) -> None:
        """Require that a body of `nbytes` is not longer than `max_body_bytes`.

        Raises:
            TooLargeError: the body is longer.
        """
        if nbytes > self.max_body_bytes:
            raise TooLargeError(
                f"a body must be at most {self.max_body_bytes} bytes, {nbytes} were received or announced"
            )


@dataclass(slots=True)
class _BodyBuffer:
    """The memory that one request's body is received into.

    Attributes:
        content_length: the announced length of the body; None for a chunked body.
        slab: memory allocated in advance, until `allocate` returns it; else None.
    """

    reader: BodyReader
    permit: Permit
    content_length: int | None
    slab: memoryview | None = None

    async def allocate_long_slab_on_thread(self) -> None:
        """Allocate the slab of a long body on another thread, before the body is received.

        Only for memory whose allocation is slow: pinning takes milliseconds, and the event loop serves
        other requests meanwhile.  Nothing is done for a short or a chunked body.

        Raises:
            OverloadedError: there is no memory.
        """
        slabs = self.reader.slab_pool
        if self.content_length is None or self.content_length < _LONG_BYTES:
            return
        self.slab = slabs.borrow_idle(self.content_length)
        if self.slab is None:
            self.slab = await make_unretained_on_thread(self._borrow_slab, self.content_length)

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory for at least `nbytes` of the body.

        The memory for a chunked body is larger than needed now, and the permit grows to cover it.  It is
        plain memory if slabs are slow to allocate; `move_to_pinned_slab` then copies the complete body.

        Raises:
            TooLargeError: the body is longer than allowed.
            OverloadedError: there is no memory.
        """
        if self.slab is not None:
            slab, self.slab = self.slab, None
            return slab
        if self.content_length is not None:
            return self._borrow_slab(nbytes)
        self.reader.require_body_limit(nbytes)
        nbytes = min(max(2 * nbytes, _FIRST_BYTES), self.reader.max_body_bytes)
        self.permit.grow(nbytes - self.permit.nbytes)
        # Slow memory is allocated once the length is known: between two chunks it would take too long.
        return allocate_plain(nbytes).data if self.reader.slab_pool.source.is_slow else self._borrow_slab(nbytes)

    async def move_to_pinned_slab(self, body: memoryview) -> memoryview:
        """Copy a chunked body from plain memory into a slab, if slabs are pinned; return a view of the slab.

        The body is returned unchanged if slabs are not pinned, or if it is so short that it will be packed
        into other memory in any case.

        Raises:
            OverloadedError: there is no memory.
        """
        if not self.reader.slab_pool.source.is_slow or len(body) <= _PACKED_BYTES:
            return body
        self.content_length = len(body)
        await self.allocate_long_slab_on_thread()
        slab = self.allocate(len(body))
        if len(body) < _LONG_BYTES:
            slab[: len(body)] = body
        else:
            await asyncio.to_thread(_copy_bytes, body, slab)
        return slab[: len(body)]

    def _borrow_slab(self, nbytes: int) -> memoryview:
        """Borrow a slab from the pool.

        Raises:
            OverloadedError: there is no memory.
        """
        try:
            return self.reader.slab_pool.borrow(nbytes)
        except MemoryError:
            raise OverloadedError(f"there is no memory for a body of {nbytes} bytes now") from None


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    # Unlike a memoryview's own copy, this one releases the GIL.
    np.frombuffer(target, np.uint8, len(source))[:] = np.frombuffer(source, np.uint8)
