"""Clients that have closed their sending side: most wait for their response, others have disconnected."""

import asyncio
import select
import socket

# Every response begins with these bytes, so they can be sent ahead of it.  The host of a disconnected client
# answers them with a reset; otherwise it accepts them.
PROBE = b"HTTP/1.1 "

_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.005, 0.5


class HalfClosedMonitor:
    """Aborts a transport once its client has disconnected.

    The end of the client's data does not show whether it still reads, and the event loop detects nothing else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._poller = select.poll()
        self._poller.register(transport.get_extra_info("socket").fileno(), 0)
        self._timer = loop.call_later(_FIRST_LOOK_S, self._check_hangup, _FIRST_LOOK_S)

    def stop(self) -> None:
        self._timer.cancel()

    def _check_hangup(self, pause_s: float) -> None:
        # With an empty event mask, only a hang-up or an error is reported.
        if self._poller.poll(0):
            self._transport.abort()
            return
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._timer = self._loop.call_later(pause_s, self._check_hangup, pause_s)


def can_detect_disconnect(transport: asyncio.Transport) -> bool:
    """Return whether the kernel reports a disconnected client without any data being sent."""
    return bool(transport.get_extra_info("socket").family == socket.AF_UNIX)
