"""The serving process's end of its channel to the process that accepts connections."""

import asyncio
import functools
import logging
import socket
from collections.abc import Callable

from normserve.logs.formatting import ThrottledLogger
from normserve.process.supervisor_channel import (
    BEAT_S,
    LINK,
    NOT_READY,
    READY,
    REFUSED,
    ReportWriter,
    decode_connection,
    receive_message,
)
from normserve.socket_readers import add_reader

log = logging.getLogger(__name__)

_REASONS = {number: reason for reason, number in REFUSED.items()}


class SupervisorChannel:
    """A channel over which this process receives connections that another process accepted, and reports its
    readiness.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        is_stalled: Callable[[], bool],
        on_connection: Callable[[socket.socket, Callable[[], None], str | None], None],
        on_refused: Callable[[str], None],
        on_link: Callable[[socket.socket], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Args:
        is_stalled: whether this process finishes no operations, even if it is ready.
        on_connection: serves a connection; calls its second argument when the connection has ended.  The third
            one is the limit that the connection exceeds, None if there is none.
        on_refused: called when the other process refused a connection; the argument names the setting.
        on_link: receives one end of the link between a front end and a process that owns a device.
        on_closed: called when the other process has ended.
        """
        self._channel = channel
        self._report_writer = ReportWriter(channel)
        self._is_stalled = is_stalled
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._on_link = on_link
        self._on_closed = on_closed
        self._is_ready = False
        self._throttled_log = ThrottledLogger(log)

    def start(self) -> None:
        """Receive connections from now on, and send a report at every beat."""
        add_reader(asyncio.get_running_loop(), self._channel, self._receive_message)
        self._send_heartbeat()

    def report_readiness(self, *, ready: bool) -> None:
        """Report to the other process whether this one is ready, now and at every beat."""
        self._is_ready = ready
        self._send_readiness()

    def report_refused_connection(self, reason: str) -> None:
        """Report that a connection was refused that the other process had accepted beyond a limit."""
        self._report_writer.send_report(REFUSED[reason])

    def request_link(self) -> None:
        """Ask the other process to link this one with the processes that it has no link with."""
        self._report_writer.send_report(LINK)

    def _receive_message(self) -> None:
        try:
            received = receive_message(self._channel)
        except BlockingIOError:
            return
        if received is None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._on_closed()
            return
        message, descriptors = received
        number, beyond = decode_connection(message)
        if (reason := _REASONS.get(number)) is not None:
            self._on_refused(reason)
        elif not descriptors:
            self._throttled_log.warning("a connection was lost: no descriptor is free")
            if number != LINK:
                self._report_writer.send_report(number)
            # The connection has ended; for a link: another one is needed.
            self._report_writer.send_report(number)
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            if number == LINK:
                self._on_link(connection)
                continue
            # The connection is received: if this process ends now, the connection ends with it.
            self._report_writer.send_report(number)
            self._on_connection(connection, functools.partial(self._report_writer.send_report, number), beyond)

    def _send_heartbeat(self) -> None:
        """Report regularly; this shows that the event loop runs."""
        if not self._report_writer.is_backlogged:
            self._send_readiness()
        asyncio.get_running_loop().call_later(BEAT_S, self._send_heartbeat)

    def _send_readiness(self) -> None:
        self._report_writer.send_report(READY if self._is_ready and not self._is_stalled() else NOT_READY)
