"""The client's end of a connection: what comes over its socket, descriptors included."""

import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from normserve.client.answers.reception import LIST_BYTES
from normserve.client.errors import ConnectionFailedError, UnexpectedAnswerError
from normserve.client.local.arena import Arena
from normserve.codec import local_frames as frames
from normserve.errors import NormserveError
from normserve.memory.segments import map_segment

_READ_BYTES = 64 * 1024
# As enumerations these take a microsecond each time.
_CLOSE_ON_EXEC, _WERE_CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_MOST_DESCRIPTORS = 4
_INT = struct.calcsize("i")
_RIGHTS_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT)
#: Shorter ones cannot be told from none.
SHORTEST_WAIT_S = 1e-4


class Incoming:
    """Answers as they come out of a socket, and the segments that came with them."""

    def __init__(self, connected: socket.socket, arena: Arena) -> None:
        self._connected = connected
        self._arena = arena
        self._frames = frames.Frames(LIST_BYTES)
        self._descriptors: deque[int] = deque()
        # Of segments in a device's memory: the number, the descriptor, which stays the caller's, and the bytes.
        self.on_device_segment: Callable[[int, int, int], None] = _unasked

    def receive(self) -> list[tuple[int, frames.Reply]]:
        """What one call of the system brings: answers by their tags.

        Raises:
            BlockingIOError: nothing came.
            ConnectionFailedError: the connection has ended.
            UnexpectedAnswerError: what came is no answer.
        """
        data, ancillary, flags, _ = self._connected.recvmsg(_READ_BYTES, _RIGHTS_BYTES, _CLOSE_ON_EXEC)
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += struct.unpack(f"{len(rights) // _INT}i", rights[: len(rights) // _INT * _INT])
        if not data:
            raise ConnectionFailedError("the server closed the connection")
        found = []
        try:
            for tag, content in self._frames.feed(data):
                answer = frames.read_reply(content)
                if answer.segment is not None:
                    self._take_segment(answer.segment, answer)
                found.append((tag, answer))
        except (NormserveError, ValueError) as error:
            raise UnexpectedAnswerError(f"the server sent a malformed answer: {error}") from None
        finally:
            if self._descriptors and (flags & _WERE_CUT or not self._frames.is_within):
                self.close()
        return found

    def close(self) -> None:
        """Close descriptors that came and belong to no answer."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _take_segment(self, number: int, answer: frames.Reply) -> None:
        if not self._descriptors:
            raise ValueError("a segment arrived without its descriptor")
        descriptor = self._descriptors.popleft()
        try:
            if answer.device:
                self.on_device_segment(number, descriptor, answer.nbytes)
            else:
                self._arena.add(number, map_segment(descriptor))
        finally:
            os.close(descriptor)


def _unasked(number: int, descriptor: int, nbytes: int) -> None:
    raise ValueError("the server sent device memory that was not requested")
