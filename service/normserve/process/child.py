"""A process that the supervisor starts and restarts, its state, and its connections."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable

from normserve.process.supervisor_channel import (
    LINK,
    NOT_READY,
    READY,
    REFUSED,
    ReportReader,
    encode_connection,
    send_with_socket,
)
from normserve.settings import make_device_environment

log = logging.getLogger(__name__)

OWNER, FRONT_END = "normserve.process.worker", "normserve.process.front_end_server"

# A process that has sent nothing for this long gets no new connections.
_QUIET_S = 3.0
_REASONS = {number: reason for reason, number in REFUSED.items()}
# Pause before another link: descriptors may be free again by then.
_RELINK_PAUSE_S = 0.5


def make_owner_name(index: int) -> str:
    """Return the name, in logs and metrics, of a process that owns a device."""
    return f"process {index}"


@dataclasses.dataclass
class HandedConnection:
    """A client's connection that the supervisor has sent to a child process, kept until the connection has ended.

    Attributes:
        connection: the socket until the process has received it, then None.
        on_end: called when the connection has ended.
        exceeded_limit: the limit that it exceeds; None if there is none.
        on_not_received: takes the connection back if the process ends before it has received it.
    """

    connection: socket.socket | None
    on_end: Callable[[], None]
    on_not_received: Callable[[socket.socket], None]
    exceeded_limit: str | None = None


class ChildSlot:
    """One slot of the supervisor for a child process.  When the process ends, the supervisor can start the
    next one in the same slot.
    """

    def __init__(
        self, name: str, module: str, make_arguments: Callable[[int], object], device: str, hang_s: float
    ) -> None:
        """Args:
        name: its name in the log.
        module: the module that it runs, with the channel's descriptor as its argument.
        make_arguments: makes the object that it reads from standard input, from the number of restarts in this
        position.
        device: the device that it sees, in the format of `--devices`.
        hang_s: a process that sends nothing for this long is killed.
        """
        self.name = name
        self._module, self._make_arguments, self._device, self._hang_s = module, make_arguments, device, hang_s
        # The connections of the process, by number.
        self._connections: dict[int, HandedConnection] = {}
        self._channel: socket.socket | None = None
        self._subprocess: asyncio.subprocess.Process | None = None
        # SIGHUP ends a process that has not sent anything yet.
        self._handles_signals = self._is_reload_pending = False
        self.restarts = 0
        self.ready_event = asyncio.Event()
        self.on_start: Callable[[], None] = lambda: None
        self.on_refused: Callable[[str], None] = lambda reason: None
        self._is_reported_ready = False
        # Whether the current process, not an earlier one in this position, has been ready.
        self._has_current_been_ready = False
        self._silence_s = 0.0

    @property
    def log_fields(self) -> dict[str, object]:
        """Log fields of the slot's current process, or of its last one."""
        pid = None if self._subprocess is None else self._subprocess.pid
        return {"child": self.name, "device": self._device or "all", "pid": pid}

    @property
    def is_reachable(self) -> bool:
        """Whether the process can receive connections: it runs and has not been silent for long.  A process that
        is reachable but not ready refuses requests.
        """
        return self._channel is not None and self._silence_s < _QUIET_S

    @property
    def is_ready(self) -> bool:
        """Whether the process has reported that it is ready to serve requests, and is still reachable."""
        return self._is_reported_ready and self.is_reachable

    async def run_process(self) -> int:
        """Start a process in this slot and wait until it ends; return its exit code.  For each sent connection that
        the process has not received, `on_not_received` is called.
        """
        here, there = socket.socketpair()
        here.setblocking(False)
        with there:
            self._subprocess = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, str(there.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[there.fileno()],
                env=make_device_environment(self._device),
                # The supervisor alone receives a terminal's interrupt, and signals the others.
                start_new_session=True,
            )
        self._channel, self._has_current_been_ready, self._silence_s = here, False, 0.0
        loop = asyncio.get_running_loop()
        report_reader = ReportReader()
        loop.add_reader(here, self._receive_reports, here, report_reader)
        assert self._subprocess.stdin is not None
        self._subprocess.stdin.write(pickle.dumps(self._make_arguments(self.restarts)))
        self._subprocess.stdin.close()
        self.on_start()
        try:
            return await self._subprocess.wait()
        finally:
            while self._receive_reports(here, report_reader):
                pass
            loop.remove_reader(here)
            here.close()
            self._channel, self._is_reported_ready, self._handles_signals = None, False, False
            handed, self._connections = self._connections, {}
            for each in handed.values():
                if each.connection is None:
                    each.on_end()
                else:
                    each.on_not_received(each.connection)

    def hand_over_connection(self, number: int, connection: HandedConnection) -> bool:
        """Send a connection to the process, which serves it; return False if it could not be sent."""
        message = encode_connection(number, connection.exceeded_limit)
        if self._channel is None or not send_with_socket(self._channel, message, connection.connection):
            return False
        self._connections[number] = connection
        return True

    def send_message(self, number: int, along: socket.socket | None = None) -> bool:
        """Send a message (one number) to the process, with a socket if one is given; return whether it could be
        sent.
        """
        return self._channel is not None and send_with_socket(self._channel, number, along)

    def request_stop(self) -> None:
        """Send SIGTERM to the process if it runs: the first makes it drain, the second makes it stop at once."""
        if self._subprocess is not None and self._subprocess.returncode is None:
            _send_signal(self._subprocess.pid, signal.SIGTERM)

    def request_tls_reload(self) -> None:
        """Make the process read the TLS files again, by SIGHUP.  Until it can handle the signal, the signal is
        postponed.
        """
        if self._handles_signals and self._subprocess is not None and self._subprocess.returncode is None:
            _send_signal(self._subprocess.pid, signal.SIGHUP)
        else:
            self._is_reload_pending = True

    def add_silence(self, elapsed_s: float) -> None:
        """Add to the time since the process last sent a message.  After three seconds a process that has been
        ready gets no new connections, and after `hang_s` it is killed.
        """
        # A process that starts loads libraries and is silent for long.
        if not self._has_current_been_ready or self._subprocess is None or self._subprocess.returncode is not None:
            return
        before, self._silence_s = self._silence_s, self._silence_s + elapsed_s
        if before < _QUIET_S <= self._silence_s:
            self._log_event(logging.WARNING, "%s gives no sign and gets no new connections", self.name)
        if before < self._hang_s <= self._silence_s:
            silent = "%s has given no sign for %.1f s and is killed"
            self._log_event(logging.ERROR, silent, self.name, self._silence_s)
            _send_signal(self._subprocess.pid, signal.SIGKILL)

    def _log_event(self, level: int, message: str, *arguments: object) -> None:
        """Log a message with the log fields of the process."""
        log.log(level, message, *arguments, extra={"fields": self.log_fields})

    def _receive_reports(self, channel: socket.socket, report_reader: ReportReader) -> bool:
        """Receive once from the process and handle the messages that have arrived.  If there are none, as after the
        process's end, stop monitoring the channel, count the process as not ready, and return False.
        """
        try:
            data = channel.recv(4096)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(channel)
            self._is_reported_ready = False
            return False
        self._handles_signals = True
        if self._is_reload_pending:
            self._is_reload_pending = False
            self.request_tls_reload()
        if self._silence_s >= _QUIET_S:
            self._log_event(logging.INFO, "%s gives signs again", self.name)
        self._silence_s = 0.0
        for number in report_reader.feed(data):
            if number in self._connections:
                self._on_connection_report(number)
            elif number in (READY, NOT_READY):
                self._is_reported_ready = number == READY
            elif (reason := _REASONS.get(number)) is not None:
                self.on_refused(reason)
            elif number == LINK:
                asyncio.get_running_loop().call_later(_RELINK_PAUSE_S, self.on_start)
        if self._is_reported_ready:
            self._has_current_been_ready = True
            self.ready_event.set()
        return True

    def _on_connection_report(self, number: int) -> None:
        """Handle a connection's number, which the process reports twice.  The first report means that the
        process has received the connection, the second that the connection has ended.
        """
        handed = self._connections[number]
        if handed.connection is not None:
            handed.connection.close()
            handed.connection = None
        else:
            del self._connections[number]
            handed.on_end()


def _send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a child process; do nothing if it no longer exists."""
    # `subprocess` would first ask whether it has ended, and take its exit code away from the event loop.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
