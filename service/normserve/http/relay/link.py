"""One end of the socket between a front end and the process that owns a device: messages in both directions."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from normserve.codec.framing import PREFIX, FrameReader, SendQueue, compute_ancillary_bytes
from normserve.engine.polling import BusyPoller
from normserve.errors import TooLargeError
from normserve.http.relay.messages import encode_into
from normserve.sockets import add_reader

_READ_BYTES = 256 * 1024
_MOST_DESCRIPTORS = 64
_RIGHTS_BYTES = compute_ancillary_bytes(_MOST_DESCRIPTORS)
# The other process is trusted: as many as a prefix can say.
_MOST_BYTES = 2**32 - 1
_BUFFER_BYTES = 4 * 2**20


class RelayLink:
    """A connected Unix socket.  What is said in one turn of the event loop leaves together, at its end.

    Messages that leave together are one frame, a list, which is encoded and decoded at once: in the process that
    owns the device each message by itself would take as long as a quarter of the work for its request.

    Attributes:
        is_behind: the kernel does not take all that was said; who says things unasked waits or gathers meanwhile.
        on_drained: told when it has taken all of it after that.
    """

    def __init__(
        self,
        connected: socket.socket,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
        *,
        lends: bool = False,
        polling: BusyPoller | None = None,
    ) -> None:
        """Args:
        on_message: is given each message as it comes; if it raises, the link ends.
        on_end: told once that the other process is gone, or has ended the link.
        lends: the other writes to memory of this process.  After a fault here, it is still lent until the other
            has ended the link.
        polling: None where the event loop sleeps between messages.
        """
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._connected = connected
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_end = on_end
        self._lends = lends
        self._polling = polling
        self._is_ending = False
        self._loop = asyncio.get_running_loop()
        # Python's `recvmsg` takes new memory of the asked length each time, which costs more than the call itself.
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._reader = FrameReader(_MOST_BYTES, _MOST_DESCRIPTORS)
        self._said: list[msgspec.Struct] = []
        self._unsent = SendQueue()
        self._is_flushing = False
        self._drained: asyncio.Future[None] | None = None
        self.is_open = True
        self.is_behind = False
        self.on_drained: Callable[[], None] = lambda: None
        add_reader(self._loop, connected, self._receive)

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Say something; nothing happens once the other is gone.

        Args: descriptor: comes along; it stays the caller's.
        """
        if not self.is_open or self._is_ending:
            return
        self._said.append(message)
        if descriptor is not None:
            # Until the kernel has taken it, nothing else may close it.
            self._end_frame((os.dup(descriptor),))
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    async def drained(self) -> None:
        """Over once all that was said has been taken by the kernel, or the other is gone."""
        if self._is_flushing and self.is_open:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def take_descriptor(self) -> int:
        """The next descriptor that came; the caller's from now on."""
        return self._reader.descriptors.popleft()

    def close(self) -> None:
        """End it from this side."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._connected)
        self._loop.remove_writer(self._connected)
        self._connected.close()
        self._forget()
        self._on_end()

    def _forget(self) -> None:
        """Drop what was to be sent, and the descriptors that came."""
        self._reader.close()
        self._said.clear()
        self._unsent.close()
        self._settle()

    def _give_up(self) -> None:
        """End it after a fault of this side."""
        if not self._lends:
            self.close()
            return
        self._is_ending = True
        self._loop.remove_writer(self._connected)
        self._forget()
        with contextlib.suppress(OSError):
            self._connected.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        try:
            nbytes, ancillary, flags, _ = self._connected.recvmsg_into(
                [self._read_buffer], _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            nbytes, ancillary, flags = 0, [], 0
        if not nbytes:
            self.close()
            return
        if self._polling is not None and not self._is_ending:
            self._polling.note_received()
        try:
            found = self._reader.feed(self._read_buffer[:nbytes], ancillary, flags)
        except TooLargeError:
            # A descriptor was lost, since none is free: each that comes later would belong to another message.
            self.close()
            return
        if self._is_ending:
            self._reader.close()
            return
        try:
            for _, content in found:
                for message in self._decode(content):
                    self._on_message(message)
                    if not self.is_open:
                        return
        except BaseException:
            # The rest of what was read would be lost, and no request in it may wait for an answer.
            self._give_up()
            raise

    def _flush(self) -> None:
        """Send what is unsent, as much of it as the kernel takes."""
        if not self.is_open or self._is_ending:
            return
        try:
            while self._unsent or self._said:
                if not self._unsent:
                    self._end_frame()
                self._unsent.send(self._connected)
        except (BlockingIOError, InterruptedError):
            self.is_behind = True
            self._loop.add_writer(self._connected, self._flush)
            return
        except OSError:
            self._give_up()
            return
        except BaseException:
            # What cannot be encoded, for lack of memory, would be tried again for ever.
            self._give_up()
            raise
        self._is_flushing = False
        if self._polling is not None:
            self._polling.note_sent()
        self._settle()
        if self.is_behind:
            self.is_behind = False
            self._loop.remove_writer(self._connected)
            self.on_drained()

    def _end_frame(self, descriptors: tuple[int, ...] = ()) -> None:
        """What has been said is one frame, with a descriptor of its last message."""
        frame = bytearray(PREFIX.size)
        encode_into(self._said, frame, PREFIX.size)
        PREFIX.pack_into(frame, 0, len(frame) - PREFIX.size, 0)
        self._said.clear()
        self._unsent.add(frame, descriptors)

    def _settle(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
