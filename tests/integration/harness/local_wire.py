"""The protocol of clients on the same host by hand, for what no client library would send."""

import contextlib
import os
import socket
import struct

import msgspec
import numpy as np
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.memory.host_segments import HostSegment, map_segment

_RIGHTS_BYTES = socket.CMSG_SPACE(8 * struct.calcsize("i"))


class LocalConnection:
    """A connection to `--local`, greeted, with frames as they come."""

    def __init__(self, path, *, greet: bool = True, key: str | None = None, timeout_s: float = 20) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        self.socket.connect(str(path))
        self.segments: dict[int, HostSegment] = {}
        self._frames = FrameReader(2**30)
        self._found: list[tuple[int, bytes]] = []
        self._descriptors: list[int] = []
        self._tag = 0
        if greet:
            assert self.request(frames.HelloMessage(frames.VERSION, key)).status == 200

    def __enter__(self) -> "LocalConnection":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave as a client does that lives on: what it does not give back stays its own."""
        with contextlib.suppress(OSError):
            for number in self.segments:
                self.send(frames.FreeSegmentMessage(number))
        self.socket.close()

    def send(self, message, tag: int = 0) -> None:
        self.socket.sendall(frames.encode_frame(tag, message))

    def receive(self) -> tuple[int, frames.LocalResponse] | None:
        """The next answer with its tag; None where the server has closed."""
        while not self._found:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(2**16, _RIGHTS_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            for _, _, rights in ancillary:
                self._descriptors += struct.unpack(f"{len(rights) // 4}i", rights)
            self._found += self._frames.feed(data)
        tag, content = self._found.pop(0)
        return tag, frames.decode_response(content)

    def request(self, message) -> frames.LocalResponse:
        """Send a message and return its answer, which must be the next."""
        self._tag += 1
        self.send(message, self._tag)
        received = self.receive()
        assert received is not None, "the server closed in place of an answer"
        assert received[0] == self._tag
        return received[1]

    def grow(self, nbytes: int = 2**20) -> int:
        """The number of a new segment."""
        answer = self.request_segment(nbytes)
        assert answer.segment is not None, answer
        return answer.segment

    def request_segment(self, nbytes: int) -> frames.LocalResponse:
        """Ask for a segment and map it, if the server grants it."""
        answer = self.request(frames.GrowArenaMessage(nbytes))
        if answer.segment is not None:
            descriptor = self._descriptors.pop()
            self.segments[answer.segment] = map_segment(descriptor)
            os.close(descriptor)
        return answer

    def array(self, segment: int, offset: int, shape, dtype=np.float32) -> np.ndarray:
        count = int(np.prod(shape))
        return np.frombuffer(memoryview(self.segments[segment]), dtype, count, offset).reshape(shape)

    def layer_norm(self, x: np.ndarray, **changes) -> frames.LocalResponse:
        """LayerNorm of an x that is written at the beginning of segment 0; y goes to its second half."""
        if not self.segments:
            self.grow()
        self.array(0, 0, x.shape)[:] = x
        return self.request(msgspec.structs.replace(request(x.shape), **changes))

    def y(self, shape) -> np.ndarray:
        return self.array(0, HALF, shape).copy()


HALF = 2**19


def located(shape, offset: int = 0, segment: int = 0, dtype: str = "float32") -> frames.TensorReference:
    return frames.TensorReference(segment, offset, dtype, tuple(shape))


def request(shape, *, offset: int = 0, segment: int = 0) -> frames.ComputeMessage:
    """LayerNorm forward of what `LocalConnection.layer_norm` writes."""
    return frames.ComputeMessage(
        op="layer_norm",
        tensors={"x": located(shape, offset, segment)},
        results={"y": frames.SegmentRange(segment, HALF, 4 * int(np.prod(shape)))},
    )
