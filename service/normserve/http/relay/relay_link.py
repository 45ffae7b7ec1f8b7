"""One end of the socket between a front end and the process that owns a device: messages in both directions."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from normserve.codec.framing import PREFIX, FrameReader, SendQueue, compute_ancillary_bytes
from normserve.engine.busy_polling import BusyPoller
from normserve.errors import TooLargeError
from normserve.http.relay.relay_messages import encode_into
from normserve.socket_readers import add_persistent_reader

_READ_BYTES = 256 * 1024
_MOST_DESCRIPTORS = 64
_RIGHTS_BYTES = compute_ancillary_bytes(_MOST_DESCRIPTORS)
# The other process is trusted: the largest number that a prefix can have.
_MOST_BYTES = 2**32 - 1
_BUFFER_BYTES = 4 * 2**20


class RelayLink:
    """One end of the Unix socket between a front end and an owner, which carries messages both ways.

    The messages of one iteration of the event loop are sent together at its end, as one frame: a list
    that is encoded and decoded at once.  In the process that owns the device, one frame for each
    message would take as long as a quarter of the work for its request.

    Attributes:
        is_backlogged: the operating system has not taken all messages; meanwhile, senders of unsolicited messages
            wait or gather them.
        on_flushed: called when the operating system has taken all messages after a backlog.
    """

    def __init__(
        self,
        connected: socket.socket,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
        *,
        shares_memory: bool = False,
        polling: BusyPoller | None = None,
    ) -> None:
        """Args:
        on_message: called with each received message; if it raises, the link ends.
        on_end: called once when the link has ended, from either side.
        shares_memory: the other process writes to memory of this one.  After a fault here, that memory stays
            shared until the other process has ended the link.
        polling: None where the event loop sleeps between messages.
        """
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._socket = connected
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_end = on_end
        self._shares_memory = shares_memory
        self._busy_poller = polling
        self._is_ending = False
        self._loop = asyncio.get_running_loop()
        # Python's `recvmsg` allocates a buffer of the requested length each time, which costs more than the call.
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._frame_reader = FrameReader(_MOST_BYTES, _MOST_DESCRIPTORS)
        self._pending_messages: list[msgspec.Struct] = []
        self._send_queue = SendQueue()
        self._is_flush_scheduled = False
        self._flushed: asyncio.Future[None] | None = None
        self.is_open = True
        self.is_backlogged = False
        self.on_flushed: Callable[[], None] = lambda: None
        add_persistent_reader(self._loop, connected, self._receive_messages)

    def send_message(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Queue a message, which is sent at the end of this iteration of the event loop.

        The message is dropped if the link has ended.

        Args: descriptor: a file descriptor to send with the message; the caller still owns and closes it.
        """
        if not self.is_open or self._is_ending:
            return
        self._pending_messages.append(message)
        if descriptor is not None:
            # Until the operating system has taken it, nothing else may close it.
            self._queue_frame((os.dup(descriptor),))
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    async def wait_flushed(self) -> None:
        """Wait until the operating system has taken all messages, or the link has ended."""
        if self._is_flush_scheduled and self.is_open:
            if self._flushed is None:
                self._flushed = self._loop.create_future()
            await asyncio.shield(self._flushed)

    def pop_descriptor(self) -> int:
        """Return the next received file descriptor, which the caller now owns."""
        return self._frame_reader.descriptors.popleft()

    def close(self) -> None:
        """Close the socket, discard unsent messages and call `on_end`; do nothing if the link has ended."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._discard_pending()
        self._on_end()

    def _discard_pending(self) -> None:
        """Discard unsent messages and received descriptors."""
        self._frame_reader.close()
        self._pending_messages.clear()
        self._send_queue.discard_all()
        self._resolve_flushed()

    def _close_or_end_sending(self) -> None:
        """After an error in this process, close the link, or only its sending side while memory is shared.

        If the other process writes to memory of this one, only the sending side is closed now: the memory
        must stay shared until the other process closes its side.
        """
        if not self._shares_memory:
            self.close()
            return
        self._is_ending = True
        self._loop.remove_writer(self._socket)
        self._discard_pending()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _receive_messages(self) -> None:
        """Read once from the socket, and call `on_message` with each complete message.

        The event loop calls this when the socket is readable.
        """
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._read_buffer], _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            nbytes, ancillary, flags = 0, [], 0
        if not nbytes:
            self.close()
            return
        if self._busy_poller is not None and not self._is_ending:
            self._busy_poller.record_received()
        try:
            found = self._frame_reader.feed(self._read_buffer[:nbytes], ancillary, flags)
        except TooLargeError:
            # A descriptor was lost, since none is free: each later one would be taken for another message's.
            self.close()
            return
        if self._is_ending:
            self._frame_reader.close()
            return
        try:
            for _, content in found:
                for message in self._decode(content):
                    self._on_message(message)
                    if not self.is_open:
                        return
        except BaseException:
            # The remaining messages are lost, and no request among them may wait for a response.
            self._close_or_end_sending()
            raise

    def _flush(self) -> None:
        """Send all queued messages; if the operating system takes no more, continue when the socket is writable."""
        if not self.is_open or self._is_ending:
            return
        try:
            while self._send_queue or self._pending_messages:
                if not self._send_queue:
                    self._queue_frame()
                self._send_queue.send_all(self._socket)
        except (BlockingIOError, InterruptedError):
            self.is_backlogged = True
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._close_or_end_sending()
            return
        except BaseException:
            # Messages that cannot be encoded, for lack of memory, would be tried again for ever.
            self._close_or_end_sending()
            raise
        self._is_flush_scheduled = False
        if self._busy_poller is not None:
            self._busy_poller.record_sent()
        self._resolve_flushed()
        if self.is_backlogged:
            self.is_backlogged = False
            self._loop.remove_writer(self._socket)
            self.on_flushed()

    def _queue_frame(self, descriptors: tuple[int, ...] = ()) -> None:
        """Encode all pending messages as one frame and add it to the send queue.

        The descriptors are sent with the frame; they are those of its last message.
        """
        frame = bytearray(PREFIX.size)
        encode_into(self._pending_messages, frame, PREFIX.size)
        PREFIX.pack_into(frame, 0, len(frame) - PREFIX.size, 0)
        self._pending_messages.clear()
        self._send_queue.add(frame, descriptors)

    def _resolve_flushed(self) -> None:
        if self._flushed is not None:
            self._flushed.set_result(None)
            self._flushed = None
