"""The memory that a client shares with the server, divided into blocks by the client alone.

A block is taken for a tensor and returns with the last view of it.  Returning may happen within any allocation of
any thread, so that a block is only noted there, and joined to its neighbours when the next one is taken.
"""

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from normserve.client.local.holes import Holes
from normserve.codec.local_frames import Place
from normserve.memory.segments import Segment

_BYTES = np.dtype(np.uint8)

# Whole cache lines keep neighbours apart, and kernels want tensors at multiples of 16 bytes.
_ALIGNMENT = 64

# Of so many sizes so many free blocks each stay as they are.  The next block of that size is the free one with the
# lowest address, whichever was freed last: autograd's thread frees its tensors in any order, and a call is repeated
# quickest at places where it was made before.
_MOST_SIZES, _MOST_SPARE, _MOST_SPARE_BYTES = 8, 8, 2**20


class Block(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of the arena that were taken; an array whose base it is keeps it.

    Attributes:
        place: where they lie, as the protocol says it.
    """

    __slots__ = ("home", "place")

    home: "Arena"
    place: Place

    def __del__(self) -> None:
        # A slice of it, which is of this class as well, has no home.
        if (home := getattr(self, "home", None)) is not None:
            home.note_return(self.place)


class Part:
    """One segment: where it is mapped, and which parts of it are free.

    Attributes:
        memory: what keeps it mapped.
    """

    def __init__(self, number: int, memory: Any, address: int, nbytes: int) -> None:
        self.number = number
        self.memory = memory
        self.address = address
        self.nbytes = nbytes
        self.holes = Holes(nbytes)


class Arena:
    """Segments, and the blocks in them.  Threads share one.

    Attributes:
        nbytes: of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._parts: dict[int, Part] = {}
        self._returned: deque[Place] = deque()
        self._spare: dict[int, list[Place]] = {}
        self._lock = threading.Lock()
        self._taken = 0
        self._on_empty: Callable[[], None] | None = None

    @property
    def segments(self) -> list[int]:
        """The numbers of all."""
        return list(self._parts)

    def add(self, number: int, segment: Segment) -> None:
        """Take in what the server has made.

        Raises:
            ValueError: there is a segment of that number.
        """
        self._add(Part(number, segment, ctypes.addressof(ctypes.c_char.from_buffer(segment)), len(segment)))

    def take(self, nbytes: int) -> Block | None:
        """A block of at least so many bytes; None where there is no space."""
        blocks = self.take_all((nbytes,))
        return None if blocks is None else blocks[0]

    def take_all(self, sizes: Sequence[int]) -> list[Block] | None:
        """A block of at least so many bytes for each of several sizes; None where there is no space for all."""
        places = self._find(sizes)
        if places is None:
            return None
        parts, blocks = self._parts, []
        for place in places:
            # Not in an array: numpy would take that for the base of arrays in the block, which they would not keep.
            block = Block((place.nbytes,), _BYTES, parts[place.segment].memory, place.offset)
            block.place = place
            block.home = self
            blocks.append(block)
        return blocks

    def locate(self, data: memoryview) -> tuple[int, int] | None:
        """The segment and the offset at which these bytes lie; None where they lie elsewhere."""
        return self.locate_address(_address(data))

    def _add(self, part: Part) -> None:
        with self._lock:
            if part.number in self._parts:
                raise ValueError("a new segment has the number of another")
            self._parts[part.number] = part
            self.nbytes += part.nbytes

    def _find(self, sizes: Sequence[int]) -> list[Place] | None:
        """Places of at least so many bytes, taken; none is where there is no space for all."""
        places = []
        with self._lock:
            self._collect()
            spare = self._spare
            for nbytes in sizes:
                size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT
                if free := spare.get(size):
                    places.append(free.pop(0))
                    if not free:
                        del spare[size]
                    continue
                place = self._cut(size)
                if place is None and spare:
                    self._give_up_spare()
                    place = self._cut(size)
                if place is None:
                    for taken in places:
                        self._join(taken)
                    return None
                places.append(place)
            self._taken += len(places)
        return places

    def _cut(self, size: int) -> Place | None:
        for part in self._parts.values():
            start = part.holes.take(size)
            if start is not None:
                return Place(part.number, start, size)
        return None

    def _give_up_spare(self) -> None:
        while self._spare:
            for place in self._spare.popitem()[1]:
                self._join(place)

    def _join(self, place: Place) -> None:
        self._parts[place.segment].holes.put(place.offset, place.offset + place.nbytes)

    def locate_address(self, address: int) -> tuple[int, int] | None:
        """As `locate`, of what begins at an address."""
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
        """Call this once no block is in use, which may be now; nothing may be taken from here on."""
        self._on_empty = then
        self._look_if_empty()

    def _look_if_empty(self) -> None:
        # The thread that holds the lock while another block returns checks again.
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
            free = self._spare.get(place.nbytes)
            if free is not None and len(free) < _MOST_SPARE:
                bisect.insort(free, place)
            elif free is None and place.nbytes <= _MOST_SPARE_BYTES and len(self._spare) < _MOST_SIZES:
                self._spare[place.nbytes] = [place]
            else:
                self._join(place)
            self._taken -= 1


def _address(data: memoryview) -> int:
    if data.readonly:
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return address
    # In a third of the time.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
