"""Framing of messages on a Unix socket, without the socket itself.

A frame is a prefix of eight bytes, the length of its content and a tag, and then the content.  Descriptors
accompany the first byte of a frame.  The code that owns the socket only moves bytes: it gives a `FrameReader` the
result of `recvmsg`, and lets a `SendQueue` send.
"""

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from normserve.errors import TooLargeError

PREFIX = struct.Struct("<II")

_INT = struct.Struct("i")
# As enumerations these take a microsecond each time.
_SOCKET, _RIGHTS, _TRUNCATED = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS), int(socket.MSG_CTRUNC)

_Data = TypeVar("_Data", bytes, memoryview)
_Bytes: TypeAlias = bytes | bytearray | memoryview


def compute_ancillary_bytes(max_descriptors: int) -> int:
    """Return the size of the ancillary buffer for receiving `max_descriptors` descriptors with `recvmsg`."""
    return socket.CMSG_SPACE(max_descriptors * _INT.size)


class FrameReader:
    """A splitter of received bytes into frames.  It keeps an incomplete frame until the rest arrives, and received
    file descriptors until they are taken.

    Attributes:
        max_bytes: the most bytes of a frame's content.
        max_descriptors: the most descriptors that may be kept at a time.
        descriptors: received descriptors that have not been taken; the code that takes one closes it.
    """

    def __init__(self, max_bytes: int, max_descriptors: int = 0) -> None:
        """Args: max_bytes, max_descriptors: as the attributes."""
        self.max_bytes = max_bytes
        self.max_descriptors = max_descriptors
        self.descriptors: deque[int] = deque()
        self._partial_frame = bytearray()
        self._needed_bytes = 0

    @property
    def has_partial_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._partial_frame)

    def feed(
        self, data: _Data, ancillary: Sequence[tuple[int, int, bytes]] = (), flags: int = 0
    ) -> list[tuple[int, _Data]]:
        """Add received bytes; return the tags and contents of the frames that are complete now.

        Args:
            data: as received; of a memoryview, contents may be views of it.
            ancillary, flags: the other results of `recvmsg`.

        Raises:
            TooLargeError: a frame is longer than permitted, or more descriptors arrived than that, or some were
                lost on the way; nothing received later can be understood.
        """
        if ancillary or flags & _TRUNCATED:
            self._add_descriptors(ancillary, flags)
        if self._partial_frame:
            self._partial_frame += data
            if len(self._partial_frame) < self._needed_bytes:
                return []
            joined, self._partial_frame = self._partial_frame, bytearray()
            data = bytes(joined) if isinstance(data, bytes) else memoryview(joined)
        elif len(data) >= PREFIX.size:
            # Usually the data is exactly one frame.
            length, tag = PREFIX.unpack_from(data)
            if length == len(data) - PREFIX.size <= self.max_bytes:
                return [(tag, data[PREFIX.size :])]
        found = []
        position, end = 0, len(data)
        self._needed_bytes = PREFIX.size
        while end - position >= PREFIX.size:
            length, tag = PREFIX.unpack_from(data, position)
            if length > self.max_bytes:
                raise TooLargeError(f"a frame must have at most {self.max_bytes} bytes, {length} are announced")
            begin = position + PREFIX.size
            if length > end - begin:
                self._needed_bytes = PREFIX.size + length
                break
            position = begin + length
            found.append((tag, data[begin:position]))
        if position < end:
            self._partial_frame += data[position:]
        return found

    def close_unclaimed(self) -> None:
        """Close descriptors that accompanied frames without a use for them, unless a frame is incomplete."""
        if not self._partial_frame:
            self.close()

    def close(self) -> None:
        """Close all received descriptors that were not taken."""
        close_descriptors(self.descriptors)
        self.descriptors.clear()

    def _add_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Keep the file descriptors that `recvmsg` received, along with earlier ones that were not taken yet.

        Raises:
            TooLargeError: there are too many, or the system dropped some; all are closed.
        """
        for level, kind, rights in ancillary:
            if level == _SOCKET and kind == _RIGHTS:
                complete_bytes = len(rights) // _INT.size * _INT.size
                self.descriptors += [descriptor for (descriptor,) in _INT.iter_unpack(rights[:complete_bytes])]
        count = len(self.descriptors)
        if flags & _TRUNCATED or count > self.max_descriptors:
            self.close()
            lost = ", and others were lost" if flags & _TRUNCATED else ""
            raise TooLargeError(
                f"at most {self.max_descriptors} descriptors must come that were requested, {count} came{lost}"
            )


class SendQueue:
    """A queue of frames to send.  The file descriptors of a frame are closed after they are sent, or when the frame
    is discarded.

    Attributes:
        last_on_lost: the `on_lost` of the last frame that was sent completely.
        has_partial_frame: a frame has been sent in part, so that only its remaining bytes may follow.
    """

    def __init__(self) -> None:
        self.last_on_lost: Callable[[], None] | None = None
        self.has_partial_frame = False
        # For each frame: the bytes that have not been sent yet, the descriptors, and `on_lost`.
        self._frames: deque[tuple[_Bytes, Sequence[int], Callable[[], None] | None]] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def add(
        self, frame: _Bytes, descriptors: Sequence[int] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Add a frame to the end of the queue.

        Args:
            descriptors: sent with the frame, and then closed.
            on_lost: returned by `discard_all` if the frame was not sent completely.
        """
        self._frames.append((frame, descriptors, on_lost))

    def add_and_send_all(self, connected: socket.socket, frame: _Bytes, flags: int = 0) -> None:
        """Add a frame to the end of the queue, and send all frames.

        Raises:
            BlockingIOError: the socket accepts no more now; the unsent bytes stay in the queue.
            OSError: the peer accepts no more; the unsent bytes stay in the queue.
        """
        if self._frames:
            self.add(frame)
        else:
            # Usually the system takes all of it.
            nbytes = 0
            try:
                nbytes = connected.send(frame, flags)
            finally:
                if nbytes < len(frame):
                    self.add(memoryview(frame)[nbytes:])
                    self.has_partial_frame = nbytes > 0
        if self._frames:
            self.send_all(connected, flags)

    def send_all(self, connected: socket.socket, flags: int = 0) -> None:
        """Send the queued frames in order until none is left.  An error is raised when the socket accepts no more.

        Raises:
            BlockingIOError: the socket accepts no more now; the unsent bytes stay in the queue.
            OSError: the peer accepts no more; the unsent bytes stay in the queue.
        """
        frames = self._frames
        while frames:
            frame, descriptors, on_lost = frames[0]
            if descriptors:
                nbytes = socket.send_fds(connected, [frame], list(descriptors), flags)
                close_descriptors(descriptors)
            else:
                nbytes = connected.send(frame, flags)
            if nbytes == len(frame):
                frames.popleft()
                self.has_partial_frame = False
                self.last_on_lost = on_lost
            else:
                # The descriptors went with the first byte.
                frames[0] = memoryview(frame)[nbytes:], (), on_lost
                self.has_partial_frame = True

    def discard_all(self) -> list[Callable[[], None]]:
        """Discard all frames, and close their descriptors.

        Return the `on_lost` callbacks of the discarded frames, for the caller to call.
        """
        lost = []
        for _, descriptors, on_lost in self._frames:
            close_descriptors(descriptors)
            if on_lost is not None:
                lost.append(on_lost)
        self._frames.clear()
        self.has_partial_frame = False
        return lost


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close all of these descriptors, even if closing some of them fails."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
