"""The socket of one connection: reads frames, writes frames and descriptors, on the event loop's thread.

Descriptors that a client sends are never received: no call here provides a buffer for them, so the operating system
closes them.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from normserve.backends.replay_interface import LaunchReplayer
from normserve.codec.framing import FrameReader, SendQueue, close_descriptors
from normserve.codec.local_messages import MAX_FRAME_BYTES
from normserve.errors import NormserveError
from normserve.socket_readers import add_persistent_reader, has_error

_READ_BYTES = 64 * 1024


class FrameCallbacks(Protocol):
    """The callbacks that a `FrameSocket` calls for a frame, for invalid bytes, and for the end of the
    connection.
    """

    def on_frame(self, first_tag: int, content: bytes, began: float, ended: float) -> None:
        """Handle a frame that was received completely.  `began` and `ended` are times by `time.perf_counter`.

        Args: first_tag: the tag of the frame's first message; later ones have the tags after it.
        """

    def on_fault(self, error: NormserveError) -> None:
        """Handle received bytes that are no valid frame.  The start of the next frame is then unknown."""

    def on_end(self) -> None:
        """Handle the end of the connection; called once."""


class FrameSocket:
    """The server's end of a Unix socket connection, which reads frames and writes frames and descriptors."""

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
        frame_s: seconds after its first byte within which a frame must be complete.
        send_s: seconds within which the client must read a sent frame.
        most_unsent: unsent frames beyond which no more frames are read from the client.
        """
        connection.setblocking(False)
        self._socket = connection
        self._callbacks = listener
        self._loop = asyncio.get_running_loop()
        self._frame_reader = FrameReader(MAX_FRAME_BYTES)
        self._max_frame_s, self._max_send_s, self._max_unsent = frame_s, send_s, most_unsent
        self._frame_began_at = 0.0
        self._send_queue = SendQueue()
        # Callbacks of frames that were not sent completely.
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
        """The descriptor of the socket."""
        return self._socket.fileno()

    @property
    def pending_replays(self) -> int:
        """Number of requests that the replayer has not answered yet."""
        return 0 if self._replayer is None or not self.is_open else self._replayer.count_launches(self.descriptor)

    def attach_replayer(self, replayer: LaunchReplayer) -> None:
        """Let a replayer, C code that answers repeated requests, receive from the socket in place of Python.  It
        answers frames that it knows, and passes the bytes of all others to `handle_bytes`.
        """
        was_reading, wanted = self._is_receiving, self._is_receiving_wanted
        self.set_receiving(wanted=False)
        replayer.add_connection(self.descriptor)
        self._replayer = replayer
        self._update_replayer()
        self._is_receiving_wanted = wanted
        if was_reading:
            self.set_receiving(wanted=True)

    def set_receiving(self, *, wanted: bool) -> None:
        """Start or stop reading from the socket.  Even if `wanted`, nothing is read while too many sent frames
        wait for the client.
        """
        self._is_receiving_wanted = wanted
        wanted = wanted and self.is_open and len(self._send_queue) <= self._max_unsent
        if wanted == self._is_receiving:
            return
        self._is_receiving = wanted
        if self._replayer is not None:
            self._replayer.set_receiving(self.descriptor, wanted)
        elif wanted:
            add_persistent_reader(self._loop, self._socket, self._read_socket)
        else:
            self._loop.remove_reader(self._socket)
        # While nothing is read, the remaining bytes of a frame cannot arrive.
        self._set_frame_timer(runs=wanted and self._frame_reader.has_partial_frame)

    def send_frame(
        self, frame: bytes, owned_descriptors: Sequence[int] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Send a frame with its file descriptors, or queue it until the client reads.  The descriptors are closed
        once they are sent.

        Args:
            on_lost: called when the connection ends, before `on_end`, if the client has certainly not read the
                frame: it
                was not sent completely, or it was the last one and the client closed with unread data.
        """
        if not self.is_open:
            close_descriptors(owned_descriptors)
            return
        self._send_queue.add(frame, owned_descriptors, on_lost)
        if len(self._send_queue) == 1:
            self._flush()
        else:
            self.set_receiving(wanted=self._is_receiving_wanted)

    def close(self) -> None:
        """Call `on_lost` for each frame that the client did not read, then `on_end`, and close the connection."""
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
        """Receive the bytes that are available and handle them.  A connection error is handled as if the client had
        closed the connection.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The client has closed with unread data, which includes the end of the last frame that was sent.
            self._was_reset = True
            data = b""
        self.handle_bytes(data)

    def handle_bytes(self, data: bytes) -> None:
        """Parse received bytes and call `on_frame` for each complete frame.  Empty `data` means that the client
        has ended the connection.
        """
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
        for first_tag, content in found:
            if not self.is_open:
                return
            self._callbacks.on_frame(first_tag, content, began, ended)
            began = ended

    def _set_frame_timer(self, *, runs: bool) -> None:
        """Start or stop the timer that closes the connection if a partly received frame is not completed in
        time.
        """
        if runs and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._max_frame_s, self.close)
        elif not runs and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _flush(self) -> None:
        """Send as many queued frames as the socket accepts.  Then update the send timer, and start or stop reading
        from the socket.
        """
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
        """Restart or stop the timer that closes the connection if the client does not read.  While it runs, the
        event loop flushes the queue whenever the socket is writable.
        """
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
        """Report to the replayer whether Python has a partial frame or unsent responses.  The replayer then passes
        received bytes, or its own responses, to Python.
        """
        if self._replayer is not None and self.is_open:
            self._replayer.set_caller_state(
                self.descriptor, self._frame_reader.has_partial_frame, bool(self._send_queue)
            )
