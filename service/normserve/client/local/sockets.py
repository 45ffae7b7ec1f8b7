"""The client's end of a connection: what comes over its socket, descriptors included."""

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from normserve.client.answers.reception import DOCUMENT_BYTES, LIST_BYTES
from normserve.client.errors import ConnectionFailedError, UnexpectedAnswerError
from normserve.client.local.arena import Arena
from normserve.codec import local_frames as frames
from normserve.codec.framing import FrameReader
from normserve.codec.local_frames import Message
from normserve.errors import NormserveError
from normserve.memory.segments import map_segment

_READ_BYTES = 64 * 1024
# As enumerations these take a microsecond each time.
_CLOSE_ON_EXEC, _WERE_CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_MOST_DESCRIPTORS = 4
_INT = struct.calcsize("i")
_RIGHTS_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT)
_RECEIVED = _READ_BYTES, _RIGHTS_BYTES, _CLOSE_ON_EXEC
_RECEIVED_AT_ONCE = _READ_BYTES, _RIGHTS_BYTES, _CLOSE_ON_EXEC | int(socket.MSG_DONTWAIT)

# An answer that comes so soon, waking included, might have been polled for; and how long that is tried.  On virtual
# machines waking alone can take 0.2 ms.
_SOON_S, _POLLED_S = 400e-6, 300e-6
# On one core the server would wait meanwhile.
_MAY_POLL = len(os.sched_getaffinity(0)) > 1
#: Shorter ones cannot be told from none.
SHORTEST_WAIT_S = 1e-4


class Incoming:
    """Answers as they come out of a socket, and the segments that came with them.

    Attributes:
        is_soon: the last answer came soon after it was waited for, so that the next one is polled for.
    """

    def __init__(self, connected: socket.socket, arena: Arena) -> None:
        self._connected = connected
        self._arena = arena
        self._frames = FrameReader(DOCUMENT_BYTES)
        self.is_soon = False
        # For how long the one that is waited for was polled for, in vain.
        self._polled_s = 0.0
        self._descriptors: deque[int] = deque()
        # Segments that are still to come, by the tags of their requests.
        self._requested: dict[int, frames.Grow] = {}
        # Of segments in a device's memory: the number, the descriptor, which stays the caller's, and the bytes.
        self.on_device_segment: Callable[[int, int, int], None] = _unasked

    def expect(self, tag: int, message: Message | msgspec.Raw) -> None:
        """Accept what a request's answer has beyond others': one segment of this size, or a long list."""
        if isinstance(message, frames.Grow):
            self._requested[tag] = message
        elif isinstance(message, frames.Layers):
            self._frames.max_bytes = LIST_BYTES

    def receive(self) -> list[tuple[int, frames.Reply]]:
        """What one call of the system brings: answers by their tags.

        Raises:
            BlockingIOError: nothing came; from now on it is waited for.
            ConnectionFailedError: the connection has ended.
            UnexpectedAnswerError: what came is no answer.
        """
        data, ancillary, flags, _ = self._polled() if self.is_soon else self._awaited()
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += struct.unpack(f"{len(rights) // _INT}i", rights[: len(rights) // _INT * _INT])
        if not data:
            raise ConnectionFailedError("the server closed the connection")
        found = []
        try:
            if len(self._descriptors) > len(self._requested):
                raise ValueError("a descriptor arrived that was not requested")
            for tag, content in self._frames.feed(data):
                answer = frames.read_reply(content)
                if self._requested or answer.segment is not None:
                    self._take_segment(self._requested.pop(tag, None), answer)
                found.append((tag, answer))
        except (NormserveError, ValueError) as error:
            raise UnexpectedAnswerError(f"the server sent a malformed answer: {error}") from None
        finally:
            if self._descriptors and (flags & _WERE_CUT or not self._frames.is_within):
                self.close()
        return found

    def _polled(self) -> Any:
        """What comes soon.

        A thread that sleeps takes longer to wake than a server with a GPU takes for a small request.  Other threads
        that want to run on this core do so meanwhile.

        Raises: BlockingIOError: nothing has.
        """
        receive = self._connected.recvmsg
        try:
            return receive(*_RECEIVED_AT_ONCE)
        except BlockingIOError:
            give_up = time.perf_counter() + _POLLED_S
        while True:
            os.sched_yield()
            try:
                return receive(*_RECEIVED_AT_ONCE)
            except BlockingIOError:
                if time.perf_counter() > give_up:
                    self.is_soon, self._polled_s = False, _POLLED_S
                    raise

    def _awaited(self) -> Any:
        """What comes at some time."""
        began = time.perf_counter() - self._polled_s
        received = self._connected.recvmsg(*_RECEIVED)
        self.is_soon, self._polled_s = _MAY_POLL and time.perf_counter() - began <= _SOON_S, 0.0
        return received

    def close(self) -> None:
        """Close descriptors that came and belong to no answer."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _take_segment(self, request: frames.Grow | None, answer: frames.Reply) -> None:
        """Map the segment that an answer brings, if it brings one: as much of it as was requested, and no more."""
        if answer.segment is None:
            if request is not None and answer.status < 400:
                raise ValueError("the answer to a request for memory must bring a segment, it brings none")
            return
        if request is None or (request.memory == "device") != bool(answer.device):
            raise ValueError("a segment arrived that was not requested")
        if not self._descriptors:
            raise ValueError("a segment arrived without its descriptor")
        descriptor = self._descriptors.popleft()
        try:
            if not answer.device:
                self._arena.add(answer.segment, map_segment(descriptor, request.nbytes))
            elif answer.nbytes < request.nbytes:
                raise ValueError(f"a segment must have at least {request.nbytes} bytes, it has {answer.nbytes}")
            else:
                self.on_device_segment(answer.segment, descriptor, answer.nbytes)
        finally:
            os.close(descriptor)


def _unasked(number: int, descriptor: int, nbytes: int) -> None:
    raise ValueError("the server sent device memory that was not requested")
