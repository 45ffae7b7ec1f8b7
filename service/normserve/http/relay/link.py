"""One end of the socket between a front end and the process that owns a device: messages in both directions."""

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from normserve.engine.polling import Polling
from normserve.http.relay.messages import LENGTH, encode_into
from normserve.sockets import add_reader

_READ_BYTES = 256 * 1024
_MOST_DESCRIPTORS = 64
_RIGHTS_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
_BUFFER_BYTES = 4 * 2**20


class Link:
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
        polling: Polling | None = None,
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
        # The beginning of a frame, and how many bytes are missing until more can be done with it.
        self._begun: list[bytes] = []
        self._missing = LENGTH.size
        self._descriptors: deque[int] = deque()
        self._said: list[msgspec.Struct] = []
        # Frames, each with the descriptor that goes along, which is closed then.
        self._unsent: deque[tuple[bytearray | memoryview, int | None]] = deque()
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
            self._end_frame(os.dup(descriptor))
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
        return self._descriptors.popleft()

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
        for descriptor in (*self._descriptors, *[kept for _, kept in self._unsent if kept is not None]):
            os.close(descriptor)
        self._descriptors.clear()
        self._said.clear()
        self._unsent.clear()
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
        for _, _, rights in ancillary:
            self._descriptors += array.array("i", rights)
        # Where a descriptor was lost, since none is free, each that comes later would belong to another message.
        if not nbytes or flags & socket.MSG_CTRUNC:
            self.close()
            return
        if self._is_ending:
            return
        if self._polling is not None:
            self._polling.note_received()
        data = self._read_buffer[:nbytes]
        if nbytes < self._missing:
            self._begun.append(bytes(data))
            self._missing -= nbytes
            return
        if self._begun:
            data = memoryview(b"".join([*self._begun, data]))
            self._begun.clear()
        self._read(data)

    def _read(self, data: memoryview) -> None:
        """Hear what whole frames say, and keep the beginning of the next one."""
        position, end = 0, len(data)
        while True:
            begin = position + LENGTH.size
            following = begin if begin > end else begin + LENGTH.unpack_from(data, position)[0]
            if following > end:
                break
            position = following
            try:
                for message in self._decode(data[begin:following]):
                    self._on_message(message)
                    if not self.is_open:
                        return
            except BaseException:
                # The rest of what was read would be lost, and no request in it may wait for an answer.
                self._give_up()
                raise
        if position < end:
            self._begun.append(bytes(data[position:]))
        self._missing = following - end

    def _flush(self) -> None:
        """Send what is unsent, as much of it as the kernel takes."""
        if not self.is_open or self._is_ending:
            return
        try:
            while self._unsent or self._said:
                self._send_next()
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

    def _send_next(self) -> None:
        """Send the next frame."""
        if not self._unsent:
            self._end_frame(None)
        data, descriptor = self._unsent[0]
        if descriptor is None:
            sent = self._connected.send(data)
        else:
            sent = socket.send_fds(self._connected, [data], [descriptor])
            os.close(descriptor)
        self._unsent.popleft()
        if sent < len(data):
            self._unsent.appendleft((memoryview(data)[sent:], None))

    def _end_frame(self, descriptor: int | None) -> None:
        """What has been said is one frame, with a descriptor of its last message."""
        frame = bytearray(LENGTH.size)
        encode_into(self._said, frame, LENGTH.size)
        LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
        self._said.clear()
        self._unsent.append((frame, descriptor))

    def _settle(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
