"""Allocation of ranges in the memory that a client shares with the server, of the host or of a device.

A range is allocated for a tensor and returns with its last view.  A return may happen within any allocation of any
thread, so it is only queued there.  A free range is cached as it is until a range of another size is needed, since
a repeated call takes the range again; then it is merged with its neighbours.

`HostArena` divides host memory into blocks; `device_arena` has the arena of a device.
"""

import bisect
import ctypes
import gc
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from normserve.codec.local_messages import ALIGNMENT, SegmentRange
from normserve.memory.host_segments import HostSegment

_start_of = itemgetter(0)

# Whole cache lines keep neighbours apart.
_LINE_BYTES = 64

_BYTES = np.dtype(np.uint8)


class FreeRanges:
    """The free byte ranges of one shared-memory segment, in order of offset, with adjacent ranges merged."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def is_all_free(self) -> bool:
        """Whether the entire segment is free."""
        return self._ranges == [(0, self._nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate from the first free range that is large enough.  Return the offset, or None if no free range is
        large enough.
        """
        for index, (start, stop) in enumerate(self._ranges):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._ranges[index]
                else:
                    self._ranges[index] = (start + nbytes, stop)
                return start
        return None

    def allocate_at(self, start: int, stop: int) -> bool:
        """Allocate exactly this range if all of its bytes are free; return whether they were."""
        holes = self._ranges
        index = bisect.bisect(holes, start, key=_start_of) - 1
        if index < 0 or holes[index][1] < stop:
            return False
        first, last = holes.pop(index)
        if stop < last:
            holes.insert(index, (stop, last))
        if first < start:
            holes.insert(index, (first, start))
        return True

    def free(self, start: int, stop: int) -> None:
        """Free a range and merge it with its neighbours."""
        holes = self._ranges
        index = bisect.bisect(holes, (start, stop))
        if index < len(holes) and holes[index][0] == stop:
            stop = holes.pop(index)[1]
        if index and holes[index - 1][1] == start:
            index -= 1
            start = holes.pop(index)[0]
        holes.insert(index, (start, stop))


_B = TypeVar("_B")


class MappedSegment:
    """A shared-memory segment that is mapped into this process, and its free ranges.

    Attributes:
        number: the server's number of the segment.
        mapping: the object that keeps the segment mapped.
    """

    def __init__(self, number: int, memory: Any, address: int, nbytes: int) -> None:
        self.number = number
        self.mapping = memory
        self.address = address
        self.nbytes = nbytes
        self.free_ranges = FreeRanges(nbytes)


class ArenaAllocator(ABC, Generic[_B]):
    """An allocator of blocks in the memory segments that one connection shares with the server.

    Threads may share one allocator.  A range that was allocated for a block is free again after the block's
    last view.

    Attributes:
        nbytes: bytes of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: dict[int, MappedSegment] = {}
        self._returned_ranges: deque[SegmentRange] = deque()
        # Free ranges that are not merged into the segments' free ranges.
        self._cached_ranges: set[SegmentRange] = set()
        self._lock = threading.Lock()
        self._allocated_count = 0
        self._on_empty: Callable[[], None] | None = None

    @property
    def segment_numbers(self) -> list[int]:
        """The numbers of all segments."""
        return list(self._segments)

    def allocate(self, nbytes: int) -> _B | None:
        """Allocate a block of at least `nbytes`; return None where there is no space."""
        blocks = self.allocate_all((nbytes,))
        return None if blocks is None else blocks[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[_B] | None:
        """Allocate a block of at least so many bytes for each size; return None where not all of them fit."""
        places = self._allocate_ranges(sizes)
        return None if places is None else self._make_blocks(places)

    def allocate_at(self, places: Sequence[SegmentRange]) -> list[_B] | None:
        """Allocate blocks at ranges of earlier blocks; return None where one of the ranges is in use."""
        return self._make_blocks(places) if self._allocate_exact_ranges(places) else None

    def locate_address(self, address: int) -> tuple[int, int] | None:
        """Return the number of the segment that contains an address, and the offset of the address in the segment.

        None if no segment contains the address, or if it is not aligned as the server requires of tensors.
        """
        for part in self._segments.values():
            if part.address <= address < part.address + part.nbytes:
                offset = address - part.address
                return None if offset % ALIGNMENT else (part.number, offset)
        return None

    def get_address(self, place: SegmentRange) -> int:
        """Return the address of a range's first byte."""
        return self._segments[place.segment].address + place.offset

    def enqueue_release(self, place: SegmentRange) -> None:
        """Queue the release of a range whose block has no views left; the next allocation frees the range.

        Garbage collection may call this in the middle of an allocation, so no lock is awaited here.  After
        `call_when_empty` this also checks whether the range was the last one in use.
        """
        self._returned_ranges.append(place)
        if self._on_empty is not None:
            self._call_back_if_empty()

    def call_when_empty(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as no range is in use, at once if none is.  Nothing may be allocated after this
        call.
        """
        self._on_empty = then
        self._call_back_if_empty()

    def remove_idle_segments(self) -> list[int]:
        """Remove all segments that have no range in use; return their numbers.

        The caller has the server free these segments.
        """
        with self._lock:
            self._collect_returned()
            self._merge_cached()
            idle = {number: part for number, part in self._segments.items() if part.free_ranges.is_all_free}
            self._segments = {number: part for number, part in self._segments.items() if number not in idle}
            self.nbytes -= sum([part.nbytes for part in idle.values()])
        return list(idle)

    def collect_garbage(self) -> bool:
        """Run Python's garbage collector; return whether views that it has deleted have returned ranges."""
        count = self._count_queued_returns()
        gc.collect()
        return self._count_queued_returns() > count

    def _count_queued_returns(self) -> int:
        return len(self._returned_ranges)

    @abstractmethod
    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[_B]:
        """Make a block for each range.  When the last view of a block has ended, the block queues the release of
        its range.
        """

    def _add_segment(self, part: MappedSegment) -> None:
        """Add a segment, all of which is free.

        Raises:
            ValueError: there is a segment of that number.
        """
        with self._lock:
            if part.number in self._segments:
                raise ValueError("a new segment has the number of another")
            # Other threads may be looking through it.
            self._segments = {**self._segments, part.number: part}
            self.nbytes += part.nbytes

    def _allocate_ranges(self, sizes: Sequence[int]) -> Sequence[SegmentRange] | None:
        """Allocate one range for each size, at the lowest addresses that are free.  If not all of them fit,
        allocate none and return None.
        """
        with self._lock:
            self._collect_returned()
            self._merge_cached()
            places: list[SegmentRange] = []
            for nbytes in sizes:
                place = self._allocate_range(-(-nbytes // _LINE_BYTES) * _LINE_BYTES or _LINE_BYTES)
                if place is None:
                    self._cached_ranges.update(places)
                    return None
                places.append(place)
            self._allocated_count += len(places)
        return places

    def _allocate_exact_ranges(self, places: Sequence[SegmentRange]) -> bool:
        """Allocate exactly these ranges and return True.  If not all of them are free, allocate none and return
        False.
        """
        with self._lock:
            self._collect_returned()
            if self._cached_ranges.issuperset(places):
                self._cached_ranges.difference_update(places)
            else:
                self._merge_cached()
                for index, place in enumerate(places):
                    part = self._segments.get(place.segment)
                    if part is None or not part.free_ranges.allocate_at(place.offset, place.offset + place.nbytes):
                        self._cached_ranges.update(places[:index])
                        return False
            self._allocated_count += len(places)
        return True

    def _allocate_range(self, size: int) -> SegmentRange | None:
        """Allocate from the first segment with enough contiguous space; return None if no segment has it.

        The caller holds the lock.
        """
        for part in self._segments.values():
            start = part.free_ranges.allocate(size)
            if start is not None:
                return SegmentRange(part.number, start, size)
        return None

    def _merge_cached(self) -> None:
        while self._cached_ranges:
            place = self._cached_ranges.pop()
            self._segments[place.segment].free_ranges.free(place.offset, place.offset + place.nbytes)

    def _collect_returned(self) -> None:
        while self._returned_ranges:
            self._cached_ranges.add(self._returned_ranges.popleft())
            self._allocated_count -= 1

    def _call_back_if_empty(self) -> None:
        """Free the queued ranges.  If no range is in use after that, call the function that was given to
        `call_when_empty`, only once.

        If another thread holds the lock, nothing is done here, since that thread checks again.
        """
        # The thread that holds the lock while another range returns checks again.
        while self._returned_ranges or not self._allocated_count:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._collect_returned()
                then = self._on_empty if not self._allocated_count else None
                if then is not None:
                    self._on_empty = None
            finally:
                self._lock.release()
            if then is not None:
                then()
                return
            if not self._allocated_count:
                return


class ArenaBlock(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An allocated block of host memory shared with the server, as an array of bytes.

    An array or tensor made over the block keeps it alive.  After the last one, the block queues its range to
    be free again.

    Attributes:
        segment_range: the segment, offset and size of the bytes.
    """

    __slots__ = ("arena", "segment_range")

    arena: "HostArena"
    segment_range: SegmentRange

    def __del__(self) -> None:
        # A slice of the block, which is of this class as well, has no arena.
        if (home := getattr(self, "arena", None)) is not None:
            home.enqueue_release(self.segment_range)


class HostArena(ArenaAllocator[ArenaBlock]):
    """The host memory that one connection shares with the server: segments, divided into blocks.

    Threads may share one arena.
    """

    def add_segment(self, number: int, segment: HostSegment) -> None:
        """Add a segment that the server has made and this process has mapped.

        Raises:
            ValueError: there is a segment of that number.
        """
        self._add_segment(
            MappedSegment(number, segment, ctypes.addressof(ctypes.c_char.from_buffer(segment)), len(segment))
        )

    def locate(self, data: memoryview) -> tuple[int, int] | None:
        """Return the number of the segment that contains a buffer, and the buffer's offset in the segment.

        None if no segment contains the buffer, or if it is not aligned as the server requires of tensors.
        """
        return self.locate_address(_get_address(data))

    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[ArenaBlock]:
        """Make a block for each range.  When the last view of a block has ended, the block queues the release of
        its range.
        """
        blocks = []
        for place in places:
            # Not in an array: numpy would take that for the base of arrays in the block, which they would not keep.
            block = ArenaBlock((place.nbytes,), _BYTES, self._segments[place.segment].mapping, place.offset)
            block.segment_range = place
            block.arena = self
            blocks.append(block)
        return blocks


def _get_address(data: memoryview) -> int:
    """Return the address of a buffer's first byte."""
    if data.readonly:
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return address
    # In a third of the time.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
