"""How long a connection waits for its client."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits, in seconds.

    Attributes:
        header_s: for a complete header, from its first byte or from the connection's start.
        send_s: for a client that reads nothing of its response.
        transfer_s: for a response that the kernel could not take at once, however steadily it is read.
    """

    header_s: float
    send_s: float
    transfer_s: float


class HeaderWatch:
    """Calls when a header is late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience, on_late: Callable[[], None]) -> None:
        self._loop = loop
        self._patience = patience
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(self._patience.header_s, self._on_late)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SendWatch:
    """Aborts a transport whose client does not read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._patience = patience
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._give_up = 0.0

    def start(self) -> None:
        """The kernel takes no more for now."""
        self._give_up = time.monotonic() + self._patience.transfer_s
        self._arm(self._transport.get_write_buffer_size())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, unsent: int) -> None:
        left = max(0.0, self._give_up - time.monotonic())
        self._timer = self._loop.call_later(min(self._patience.send_s, left), self._check, unsent)

    def _check(self, unsent_before: int) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent >= unsent_before or time.monotonic() >= self._give_up:
            self._transport.abort()
        else:
            self._arm(unsent)
