"""The host memory that a client shares with the server, divided into blocks."""

import ctypes
from collections.abc import Sequence

import numpy as np

from normserve.client.local.allocator import ArenaAllocator, MappedSegment
from normserve.codec.local_messages import SegmentRange
from normserve.memory.host_segments import HostSegment

_BYTES = np.dtype(np.uint8)


class ArenaBlock(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Allocated bytes of the arena; an array with the block as its base keeps the block.

    Attributes:
        segment_range: the segment, offset and size of the bytes.
    """

    __slots__ = ("arena", "segment_range")

    arena: "HostArena"
    segment_range: SegmentRange

    def __del__(self) -> None:
        # A slice of the block, which is of this class as well, has no arena.
        if (home := getattr(self, "arena", None)) is not None:
            home.queue_return(self.segment_range)


class HostArena(ArenaAllocator[ArenaBlock]):
    """Segments of host memory and the blocks in them, which threads share."""

    def add_segment(self, number: int, segment: HostSegment) -> None:
        """Add a segment that the server has made.

        Raises:
            ValueError: there is a segment of that number.
        """
        self._add_segment(
            MappedSegment(number, segment, ctypes.addressof(ctypes.c_char.from_buffer(segment)), len(segment))
        )

    def locate(self, data: memoryview) -> tuple[int, int] | None:
        """Do as `locate_address` for the first of these bytes."""
        return self.locate_address(_get_address(data))

    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[ArenaBlock]:
        blocks = []
        for place in places:
            # Not in an array: numpy would take that for the base of arrays in the block, which they would not keep.
            block = ArenaBlock((place.nbytes,), _BYTES, self._segments[place.segment].mapping, place.offset)
            block.segment_range = place
            block.arena = self
            blocks.append(block)
        return blocks


def _get_address(data: memoryview) -> int:
    if data.readonly:
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return address
    # In a third of the time.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
