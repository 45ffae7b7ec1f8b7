"""Allocation of ranges in the memory that a client shares with the server, of the host or of a device.

A range is allocated for a tensor and returns with its last view.  A return may happen within any allocation of
any thread, so it is only queued there.  A free range is cached as it is until a range of another size is needed,
since a repeated call takes the range again; then it is merged with its neighbours.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from normserve.client.local.holes import FreeRanges
from normserve.codec.local_messages import ALIGNMENT, SegmentRange

B = TypeVar("B")

# Whole cache lines keep neighbours apart.
_LINE_BYTES = 64


class MappedSegment:
    """A mapped segment and its free ranges.

    Attributes:
        mapping: the object that keeps the segment mapped.
    """

    def __init__(self, number: int, memory: Any, address: int, nbytes: int) -> None:
        self.number = number
        self.mapping = memory
        self.address = address
        self.nbytes = nbytes
        self.free_ranges = FreeRanges(nbytes)


class ArenaAllocator(ABC, Generic[B]):
    """An allocator of blocks in segments, which threads share.

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

    def allocate(self, nbytes: int) -> B | None:
        """Allocate a block of at least `nbytes`; return None where there is no space."""
        blocks = self.allocate_all((nbytes,))
        return None if blocks is None else blocks[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[B] | None:
        """Allocate a block of at least so many bytes for each size; return None where not all of them fit."""
        places = self._allocate_ranges(sizes)
        return None if places is None else self._make_blocks(places)

    def allocate_at(self, places: Sequence[SegmentRange]) -> list[B] | None:
        """Allocate blocks at ranges of earlier blocks; return None where one of the ranges is in use."""
        return self._make_blocks(places) if self._allocate_exact_ranges(places) else None

    def locate_address(self, address: int) -> tuple[int, int] | None:
        """Return the segment and the offset of an address; None where the server cannot read a tensor there."""
        for part in self._segments.values():
            if part.address <= address < part.address + part.nbytes:
                offset = address - part.address
                return None if offset % ALIGNMENT else (part.number, offset)
        return None

    def get_address(self, place: SegmentRange) -> int:
        """Return the address of a range's first byte."""
        return self._segments[place.segment].address + place.offset

    def queue_return(self, place: SegmentRange) -> None:
        """Queue a range without views for its return to the free ranges."""
        self._returned_ranges.append(place)
        if self._on_empty is not None:
            self._check_empty()

    def call_when_empty(self, then: Callable[[], None]) -> None:
        """Call `then` once no range is in use, possibly now; nothing may be allocated from here on."""
        self._on_empty = then
        self._check_empty()

    def remove_idle_segments(self) -> list[int]:
        """Remove all segments without a range in use; return their numbers, for the caller to free them."""
        with self._lock:
            self._collect_returned()
            self._merge_cached()
            idle = {number: part for number, part in self._segments.items() if part.free_ranges.is_all_free}
            self._segments = {number: part for number, part in self._segments.items() if number not in idle}
            self.nbytes -= sum([part.nbytes for part in idle.values()])
        return list(idle)

    @abstractmethod
    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[B]:
        """Make a block for each range, which keeps the range and queues its return."""

    def _add_segment(self, part: MappedSegment) -> None:
        with self._lock:
            if part.number in self._segments:
                raise ValueError("a new segment has the number of another")
            # Other threads may be looking through it.
            self._segments = {**self._segments, part.number: part}
            self.nbytes += part.nbytes

    def _allocate_ranges(self, sizes: Sequence[int]) -> Sequence[SegmentRange] | None:
        """Allocate a range for each size, at the lowest addresses; return None where not all of them fit."""
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
        """Allocate exactly these ranges; return False and allocate none where not all of them are free."""
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

    def _check_empty(self) -> None:
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
