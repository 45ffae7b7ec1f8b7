"""The host memory that a client shares with the server, in blocks."""

import ctypes
from collections.abc import Sequence

import numpy as np

from normserve.client.local.allocator import Allocator, Part
from normserve.codec.local_frames import Place
from normserve.memory.segments import Segment

_BYTES = np.dtype(np.uint8)


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


class Arena(Allocator[Block]):
    """Segments of the host's memory, and the blocks in them.  Threads share one."""

    def add(self, number: int, segment: Segment) -> None:
        """Take in what the server has made.

        Raises:
            ValueError: there is a segment of that number.
        """
        self._add(Part(number, segment, ctypes.addressof(ctypes.c_char.from_buffer(segment)), len(segment)))

    def locate(self, data: memoryview) -> tuple[int, int] | None:
        """As `locate_address` of these bytes."""
        return self.locate_address(_address(data))

    def _blocks(self, places: Sequence[Place]) -> list[Block]:
        blocks = []
        for place in places:
            # Not in an array: numpy would take that for the base of arrays in the block, which they would not keep.
            block = Block((place.nbytes,), _BYTES, self._parts[place.segment].memory, place.offset)
            block.place = place
            block.home = self
            blocks.append(block)
        return blocks


def _address(data: memoryview) -> int:
    if data.readonly:
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return address
    # In a third of the time.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
