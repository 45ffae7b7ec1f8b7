"""The socket of one connection: reads frames, writes frames and descriptors, on the event loop's thread.

Descriptors that a client sends are never received: no call here provides a buffer for them, so the kernel closes
them.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from normserve.backends.replayer import LaunchReplayer
from normserve.codec.framing import FrameReader, SendQueue, close_descriptors
from normserve.codec.local_frames import MAX_FRAME_BYTES
from normserve.errors import NormserveError
from normserve.sockets import add_reader, has_error

_READ_BYTES = 64 * 1024


class FrameCallbacks(Protocol):
    """Whom a wire tells what happens."""

    def on_frame(self, tag: int, content: bytes, began: float, ended: float) -> None:
        """A frame has come; its first byte at `began` and its last at `ended`, by `time.perf_counter`."""

    def on_fault(self, error: NormserveError) -> None:
        """What came is no frame; nothing after it can be told apart."""

    def on_end(self) -> None:
        """The connection has ended; called once."""


class FrameSocket:
    """A connected Unix socket."""

    def __init__(
        self,
        connection: socket.socket,
        listener: FrameCallbacks,
        *,
        frame_s: float,
        send_s: float,
        most_unsent: int,
    ) -> None:
        """Args:
        frame_s: a frame must be whole so long after its first byte.
        send_s: the client must have read what it was sent so long after.
        most_unsent: frames that may wait for a client to read; it is not read from meanwhile.
        """
        connection.setblocking(False)
        self._connection = connection
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._frame_s, self._send_s, self._most_unsent = frame_s, send_s, most_unsent
        self._began = 0.0
        self._unsent = SendQueue()
        # Of frames that were not sent whole.
        self._lost: list[Callable[[], None]] = []
        self._was_reset = False
        self._frame_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._replayer: LaunchReplayer | None = None
        self._is_reading = False
        self._wants_input = False
        self.is_open = True

    @property
    def descriptor(self) -> int:
        """The socket's."""
        return self._connection.fileno()

    @property
    def flights(self) -> int:
        """Requests that the replayer has not answered yet."""
        return 0 if self._replayer is None or not self.is_open else self._replayer.flights(self.descriptor)

    def receive_through(self, replayer: LaunchReplayer) -> None:
        """Have a replayer receive from now on, which answers some frames itself; the others go to `take`."""
        was_reading, wanted = self._is_reading, self._wants_input
        self.read(wanted=False)
        replayer.open(self.descriptor)
        self._replayer = replayer
        self._tell_replayer()
        self._wants_input = wanted
        if was_reading:
            self.read(wanted=True)

    def read(self, *, wanted: bool) -> None:
        """Whether more frames are wanted now."""
        self._wants_input = wanted
        wanted = wanted and self.is_open and len(self._unsent) <= self._most_unsent
        if wanted == self._is_reading:
            return
        self._is_reading = wanted
        if self._replayer is not None:
            self._replayer.read(self.descriptor, wanted)
        elif wanted:
            add_reader(self._loop, self._connection, self._receive)
        else:
            self._loop.remove_reader(self._connection)
        # While nothing is read, the rest of a frame cannot come.
        self._time_frame(runs=wanted and self._frames.is_within)

    def send(
        self, frame: bytes, descriptors: Sequence[int] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Send a frame, now or once the client reads; the descriptors that go with it are closed then.

        Args: on_lost: called at the connection's end, before its listener, if the client has certainly not read the
            frame: it was not sent whole, or it was the last one and the client closed without reading everything.
        """
        if not self.is_open:
            close_descriptors(descriptors)
            return
        self._unsent.add(frame, descriptors, on_lost)
        if len(self._unsent) == 1:
            self._flush()
        else:
            self.read(wanted=self._wants_input)

    def close(self) -> None:
        """End the connection."""
        if not self.is_open:
            return
        self.read(wanted=False)
        self.is_open = False
        self._time_frame(runs=False)
        if self._send_timer is not None:
            self._send_timer.cancel()
        if self._unsent:
            self._loop.remove_writer(self._connection)
        self._lost += self._unsent.close()
        was_reset = self._was_reset or has_error(self.descriptor)
        # Where there is a replayer it may have sent later frames.
        if was_reset and self._unsent.on_last_lost is not None and self._replayer is None:
            self._lost.append(self._unsent.on_last_lost)
        if self._replayer is not None:
            self._replayer.close(self.descriptor)
        for on_lost in self._lost:
            on_lost()
        self._listener.on_end()
        self._connection.close()

    def _receive(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The client has closed and not read everything: not the end of what was sent last.
            self._was_reset = True
            data = b""
        self.take(data)

    def take(self, data: bytes) -> None:
        """Bytes have come; none where the client has ended the connection."""
        if not data:
            self.close()
            return
        ended = time.perf_counter()
        began = self._began if self._frames.is_within else ended
        try:
            found = self._frames.feed(data)
        except NormserveError as error:
            self._listener.on_fault(error)
            return
        is_within = self._frames.is_within
        if self._frame_timer is not None and (found or not is_within):
            self._time_frame(runs=False)
        if is_within:
            self._began = ended if found else began
            self._time_frame(runs=True)
        self._tell_replayer()
        for tag, content in found:
            if not self.is_open:
                return
            self._listener.on_frame(tag, content, began, ended)
            began = ended

    def _time_frame(self, *, runs: bool) -> None:
        """Let the clock run for a frame that is not whole, or stop it."""
        if runs and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._frame_s, self.close)
        elif not runs and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _flush(self) -> None:
        try:
            self._unsent.send(self._connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # Frames that the client sent before it left are still to be received, and its end after them.
            self._lost += self._unsent.close()
        self._time_sending(runs=bool(self._unsent))
        self._tell_replayer()
        self.read(wanted=self._wants_input)

    def _time_sending(self, *, runs: bool) -> None:
        """Wait until the client reads, for a while, or stop waiting."""
        is_waiting = self._send_timer is not None
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        if runs:
            self._send_timer = self._loop.call_later(self._send_s, self.close)
        if runs and not is_waiting:
            self._loop.add_writer(self._connection, self._flush)
        elif is_waiting and not runs:
            self._loop.remove_writer(self._connection)

    def _tell_replayer(self) -> None:
        """What is begun here must be ended here: a frame, and answers that the client does not read."""
        if self._replayer is not None and self.is_open:
            self._replayer.hold(self.descriptor, self._frames.is_within, bool(self._unsent))
