"""Reception and discarding of the remaining bytes of refused bodies.

Many clients read a response only when they have sent their request completely.  If the connection were closed
before, they would get a reset in place of the response.
"""

import asyncio
import time
from collections.abc import Callable

from normserve.http.transport.connection_timeouts import ConnectionTimeouts
from normserve.http.transport.transfer_progress import SlowTransferMonitor, TransferProgress

# Time for a body without a slot for a long drain, and longest pause of any body.
_SHORT_S = 2.0

SMALL_BODY_BYTES = 2**20
"""Largest body that is received completely before the response is sent, in bytes.

A client that reads while it sends would otherwise stop sending, and another connection costs more than the
remaining bytes of the body.
"""

# As many as requests are usually in progress at once.
_MAX_LONG_DRAINS = 256
# Statuses of requests that were refused by their key or host, before anything else was checked.
_STRANGERS = frozenset({401, 403, 421})
_STRANGERS_SHARE = 4


class DiscardLimits:
    """The limits for discarding the bodies of refused requests, shared by all connections of a process.

    Attributes:
        max_bytes: limit of the discarded bytes of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # Requests with these statuses have separate slots.
        self._free_slots = {False: _MAX_LONG_DRAINS, True: _MAX_LONG_DRAINS // _STRANGERS_SHARE}

    def try_acquire_long_slot(self, status: int) -> Callable[[], None] | None:
        """Take one of the slots for discarding a body for a long time; return a function that releases it, or None.

        Requests that are refused by their key or host have separate, fewer slots.

        Args: status: the status of the response.

        Returns: a function that releases the slot; None if all slots are taken.
        """
        is_stranger = status in _STRANGERS
        if not self._free_slots[is_stranger]:
            return None
        self._free_slots[is_stranger] -= 1

        def release() -> None:
            self._free_slots[is_stranger] += 1

        return release


class BodyDiscard:
    """The discarding of a refused body's remaining bytes, until it is complete, too slow or too long."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: DiscardLimits, on_fault: Callable[[], None]
    ) -> None:
        """Args: on_fault: called if the body is too slow or too long; not called after `stop`."""
        self._loop = loop
        self._limits = limits
        self._on_fault = on_fault
        self._discarded_bytes = 0
        self._monitor: SlowTransferMonitor | None = None
        self._release_slot: Callable[[], None] | None = None
        self._completion: asyncio.Future[None] | None = None

    async def wait_small_body(self) -> None:
        """Wait up to two seconds for the end of the body, before the response is sent; for small bodies only.

        The response is sent afterwards, since many clients read only after they have sent their request.
        """
        self._completion = self._loop.create_future()
        timer = self._loop.call_later(_SHORT_S, self._resolve_wait)
        try:
            await self._completion
        finally:
            timer.cancel()

    def try_start_long_limit(self, timeouts: ConnectionTimeouts, status: int, rest_bytes: int | None) -> bool:
        """Start to limit the time for the remaining bytes; return False if the limit is only two seconds.

        The limit is two seconds if too many bytes remain, or no slot is free.

        Args:
            status: the status of the response.
            rest_bytes: the number of remaining bytes; None if it is unknown.
        """
        if rest_bytes is None or rest_bytes <= self._limits.max_bytes:
            self._release_slot = self._limits.try_acquire_long_slot(status)
        is_long = self._release_slot is not None
        pace = TransferProgress(
            time.perf_counter(),
            _SHORT_S,
            timeouts.transfer_s if is_long else min(timeouts.transfer_s, _SHORT_S),
            timeouts.min_bytes_per_s,
            _SHORT_S,
        )
        self._monitor = SlowTransferMonitor(
            self._loop, pace, lambda: self._discarded_bytes, lambda fault: self._on_fault()
        )
        return is_long

    def count_bytes(self, nbytes: int) -> None:
        """Count discarded bytes; call `on_fault` if the body is longer than the limit."""
        self._discarded_bytes += nbytes
        if self._discarded_bytes > self._limits.max_bytes:
            self._on_fault()

    def stop(self) -> None:
        """Stop the timers and release the slot: the body is complete, or the connection ends."""
        if self._monitor is not None:
            self._monitor.stop()
        if self._release_slot is not None:
            self._release_slot()
            self._release_slot = None
        self._resolve_wait()

    def _resolve_wait(self) -> None:
        if self._completion is not None and not self._completion.done():
            self._completion.set_result(None)
