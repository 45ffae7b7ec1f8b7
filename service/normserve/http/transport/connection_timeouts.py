"""Timeouts of a connection."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from normserve.http.transport.response_sender import SocketResponseSender
from normserve.http.transport.transfer_progress import SlowTransferMonitor, TransferProgress


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """The limits of a connection's times and transfer rates.

    Attributes:
        header_s: time for a complete header, from its first byte or from the connection's start.
        send_s: time for which a client may read nothing of its response.
        transfer_s: time for a response that the operating system could not take at once, even if it is read
            steadily, and for the remaining bytes of a discarded body.
        min_bytes_per_s: minimum mean rate of such a response or body from then on; 0 for none.
        grace_s: time after which that rate applies.
    """

    header_s: float
    send_s: float
    transfer_s: float
    min_bytes_per_s: float = 0.0
    grace_s: float = 0.0


class HeaderTimer:
    """A timer that calls a function if a request's header is not complete in time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, patience: ConnectionTimeouts, on_late: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._timeouts = patience
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(self._timeouts.header_s, self._on_late)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SlowReaderMonitor:
    """Aborts a connection whose client reads its response too slowly."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        patience: ConnectionTimeouts,
        transport: asyncio.Transport,
        *,
        unseen_bytes: int = 0,
    ) -> None:
        """Args: unseen_bytes: bytes that may be sent before the transport reports them."""
        self._loop = loop
        self._timeouts = patience
        self._transport = transport
        self._uncounted_bytes = unseen_bytes
        self._monitor: SlowTransferMonitor | None = None

    def start(self, response: SocketResponseSender | None) -> None:
        """Start to monitor the client, because the operating system takes no more bytes for now.

        Args: response: the response with unsent bytes; None for the last bytes of a complete response.
        """
        self.stop()
        unsent = self._transport.get_write_buffer_size
        if response is None:
            unsent_at_start = unsent()
            self._monitor = SlowTransferMonitor(
                self._loop, self._make_progress(), lambda: unsent_at_start - unsent(), self._abort_transport
            )
            return
        if response.progress is None:
            response.progress, response.pending_bytes = self._make_progress(), unsent()
        self._monitor = SlowTransferMonitor(
            self._loop, response.progress, lambda: response.pending_bytes - unsent(), self._abort_transport
        )

    def stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _make_progress(self) -> TransferProgress:
        """Make the speed limits for reading a response, which apply from now on."""
        limits = self._timeouts
        return TransferProgress(
            time.perf_counter(),
            limits.send_s,
            limits.transfer_s,
            limits.min_bytes_per_s,
            limits.grace_s,
            self._uncounted_bytes,
        )

    def _abort_transport(self, fault: str) -> None:
        self._transport.abort()
