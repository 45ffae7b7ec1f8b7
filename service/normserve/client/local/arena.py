"""The memory that a client shares with the server, divided into blocks by the client alone.

A block is taken for a tensor and returns with the last view of it.  Returning may happen within any allocation of
any thread, so that a block is only noted there, and joined to its neighbours when the next one is taken.
"""

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from normserve.codec.local_frames import Place
from normserve.memory.segments import Segment

# Whole cache lines keep neighbours apart, and kernels want tensors at multiples of 16 bytes.
_ALIGNMENT = 64


class Block(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of the arena as whoever took them sees them.

    Attributes:
        place: where they lie, as the protocol says it.
    """

    place: Place
    home: "Arena | None" = None

    def __del__(self) -> None:
        if self.home is not None:
            self.home.note_return(self.place)


class _Part:
    """One segment: where it is mapped, and what of it nobody has."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.memory = np.frombuffer(segment, np.uint8)
        self.address: int = self.memory.__array_interface__["data"][0]
        self.nbytes = len(segment)
        # Ordered by their offsets, and never side by side.
        self.holes: list[tuple[int, int]] = [(0, self.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The offset of so many bytes; the first hole that has them is cut."""
        for index, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self.holes[index]
                else:
                    self.holes[index] = (start + nbytes, stop)
                return start
        return None

    def put(self, start: int, stop: int) -> None:
        """These are nobody's again."""
        holes = self.holes
        index = bisect.bisect(holes, (start, stop))
        if index < len(holes) and holes[index][0] == stop:
            stop = holes.pop(index)[1]
        if index and holes[index - 1][1] == start:
            index -= 1
            start = holes.pop(index)[0]
        holes.insert(index, (start, stop))


class Arena:
    """Segments, and the blocks in them.  Threads share one.

    Attributes:
        nbytes: of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._parts: dict[int, _Part] = {}
        self._returned: deque[Place] = deque()
        self._lock = threading.Lock()
        self._taken = 0
        self._on_empty: Callable[[], None] | None = None

    @property
    def segments(self) -> list[int]:
        """The numbers of all."""
        return list(self._parts)

    def add(self, number: int, segment: Segment) -> None:
        """Take in what the server has made."""
        with self._lock:
            self._parts[number] = _Part(number, segment)
            self.nbytes += len(segment)

    def take(self, nbytes: int) -> Block | None:
        """A block of at least so many bytes; None where there is no room."""
        size = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        with self._lock:
            if self._returned:
                self._collect()
            for part in self._parts.values():
                start = part.take(size)
                if start is not None:
                    self._taken += 1
                    block = Block((size,), np.uint8, part.memory, start)
                    break
            else:
                return None
        block.place = Place(part.number, start, size)
        block.home = self
        return block

    def locate(self, data: memoryview) -> tuple[int, int] | None:
        """The segment and the offset at which these bytes lie; None where they lie elsewhere."""
        address = _address(data)
        for part in self._parts.values():
            if part.address <= address < part.address + part.nbytes:
                return part.number, address - part.address
        return None

    def note_return(self, place: Place) -> None:
        """The last view of a block is gone."""
        self._returned.append(place)
        if self._on_empty is not None:
            self._look_if_empty()

    def once_empty(self, then: Callable[[], None]) -> None:
        """Call this once nobody has a block any more, which may be now; nothing may be taken from here on."""
        self._on_empty = then
        self._look_if_empty()

    def _look_if_empty(self) -> None:
        # Whoever holds the lock while another block returns looks again.
        while self._returned or not self._taken:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._collect()
                then = self._on_empty if not self._taken else None
                if then is not None:
                    self._on_empty = None
            finally:
                self._lock.release()
            if then is not None:
                then()
                return
            if not self._taken:
                return

    def _collect(self) -> None:
        while self._returned:
            place = self._returned.popleft()
            self._parts[place.segment].put(place.offset, place.offset + place.nbytes)
            self._taken -= 1


def _address(data: memoryview) -> int:
    if data.readonly:
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return address
    # In a third of the time.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
