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
        self._socket = connection
        self._callbacks = listener
        self._loop = asyncio.get_running_loop()
        self._frame_reader = FrameReader(MAX_FRAME_BYTES)
        self._max_frame_s, self._max_send_s, self._max_unsent = frame_s, send_s, most_unsent
        self._frame_began_at = 0.0
        self._send_queue = SendQueue()
        # Of frames that were not sent whole.
        self._lost_callbacks: list[Callable[[], None]] = []
        self._was_reset = False
        self._frame_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._replayer: LaunchReplayer | None = None
        self._is_receiving = False
        self._is_receiving_wanted = False
        self.is_open = True

    @property
    def descriptor(self) -> int:
        """The socket's."""
        return self._socket.fileno()

    @property
    def pending_replays(self) -> int:
        """Requests that the replayer has not answered yet."""
        return 0 if self._replayer is None or not self.is_open else self._replayer.count_launches(self.descriptor)

    def attach_replayer(self, replayer: LaunchReplayer) -> None:
        """Have a replayer receive from now on, which answers some frames; the others go to `handle_bytes`."""
        was_reading, wanted = self._is_receiving, self._is_receiving_wanted
        self.set_receiving(wanted=False)
        replayer.add_connection(self.descriptor)
        self._replayer = replayer
        self._update_replayer()
        self._is_receiving_wanted = wanted
        if was_reading:
            self.set_receiving(wanted=True)

    def set_receiving(self, *, wanted: bool) -> None:
        """Whether more frames are wanted now."""
        self._is_receiving_wanted = wanted
        wanted = wanted and self.is_open and len(self._send_queue) <= self._max_unsent
        if wanted == self._is_receiving:
            return
        self._is_receiving = wanted
        if self._replayer is not None:
            self._replayer.set_receiving(self.descriptor, wanted)
        elif wanted:
            add_reader(self._loop, self._socket, self._read_socket)
        else:
            self._loop.remove_reader(self._socket)
        # While nothing is read, the rest of a frame cannot come.
        self._set_frame_timer(runs=wanted and self._frame_reader.has_partial_frame)

    def send_frame(
        self, frame: bytes, descriptors: Sequence[int] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Send a frame, now or once the client reads; the descriptors that go with it are closed then.

        Args: on_lost: called at the connection's end, before its listener, if the client has certainly not read the
            frame: it was not sent whole, or it was the last one and the client closed without reading everything.
        """
        if not self.is_open:
            close_descriptors(descriptors)
            return
        self._send_queue.add(frame, descriptors, on_lost)
        if len(self._send_queue) == 1:
            self._flush()
        else:
            self.set_receiving(wanted=self._is_receiving_wanted)

    def close(self) -> None:
        """End the connection."""
        if not self.is_open:
            return
        self.set_receiving(wanted=False)
        self.is_open = False
        self._set_frame_timer(runs=False)
        if self._send_timer is not None:
            self._send_timer.cancel()
        if self._send_queue:
            self._loop.remove_writer(self._socket)
        self._lost_callbacks += self._send_queue.discard_all()
        was_reset = self._was_reset or has_error(self.descriptor)
        # Where there is a replayer it may have sent later frames.
        if was_reset and self._send_queue.last_on_lost is not None and self._replayer is None:
            self._lost_callbacks.append(self._send_queue.last_on_lost)
        if self._replayer is not None:
            self._replayer.remove_connection(self.descriptor)
        for on_lost in self._lost_callbacks:
            on_lost()
        self._callbacks.on_end()
        self._socket.close()

    def _read_socket(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The client has closed and not read everything: not the end of what was sent last.
            self._was_reset = True
            data = b""
        self.handle_bytes(data)

    def handle_bytes(self, data: bytes) -> None:
        """Bytes have come; none where the client has ended the connection."""
        if not data:
            self.close()
            return
        ended = time.perf_counter()
        began = self._frame_began_at if self._frame_reader.has_partial_frame else ended
        try:
            found = self._frame_reader.feed(data)
        except NormserveError as error:
            self._callbacks.on_fault(error)
            return
        is_within = self._frame_reader.has_partial_frame
        if self._frame_timer is not None and (found or not is_within):
            self._set_frame_timer(runs=False)
        if is_within:
            self._frame_began_at = ended if found else began
            self._set_frame_timer(runs=True)
        self._update_replayer()
        for tag, content in found:
            if not self.is_open:
                return
            self._callbacks.on_frame(tag, content, began, ended)
            began = ended

    def _set_frame_timer(self, *, runs: bool) -> None:
        """Let the clock run for a frame that is not whole, or stop it."""
        if runs and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._max_frame_s, self.close)
        elif not runs and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _flush(self) -> None:
        try:
            self._send_queue.send_all(self._socket)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # Frames that the client sent before it left are still to be received, and its end after them.
            self._lost_callbacks += self._send_queue.discard_all()
        self._set_send_timer(runs=bool(self._send_queue))
        self._update_replayer()
        self.set_receiving(wanted=self._is_receiving_wanted)

    def _set_send_timer(self, *, runs: bool) -> None:
        """Wait until the client reads, for a while, or stop waiting."""
        is_waiting = self._send_timer is not None
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        if runs:
            self._send_timer = self._loop.call_later(self._max_send_s, self.close)
        if runs and not is_waiting:
            self._loop.add_writer(self._socket, self._flush)
        elif is_waiting and not runs:
            self._loop.remove_writer(self._socket)

    def _update_replayer(self) -> None:
        """What is begun here must be ended here: a frame, and answers that the client does not read."""
        if self._replayer is not None and self.is_open:
            self._replayer.set_caller_state(
                self.descriptor, self._frame_reader.has_partial_frame, bool(self._send_queue)
            )
