"""Divides the memory that a client shares with the server; of whichever kind it is.

A place is taken for a tensor and returns with the last view of it.  Returning may happen within any allocation of
any thread, so that it is only noted there.  A place that is free stays as it is until another one is looked for,
since a call that comes again takes it again; then it is joined to its neighbours.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from normserve.client.local.holes import FreeRanges
from normserve.codec.local_frames import ALIGNMENT, SegmentRange

B = TypeVar("B")

# Whole cache lines keep neighbours apart.
_LINE_BYTES = 64


class MappedSegment:
    """One segment: where it is mapped, and which parts of it are free.

    Attributes:
        mapping: what keeps it mapped.
    """

    def __init__(self, number: int, memory: Any, address: int, nbytes: int) -> None:
        self.number = number
        self.mapping = memory
        self.address = address
        self.nbytes = nbytes
        self.free_ranges = FreeRanges(nbytes)


class ArenaAllocator(ABC, Generic[B]):
    """Segments, and the blocks at places in them that are taken.  Threads share one.

    Attributes:
        nbytes: of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: dict[int, MappedSegment] = {}
        self._returned_ranges: deque[SegmentRange] = deque()
        # Free, and not in the holes.
        self._cached_ranges: set[SegmentRange] = set()
        self._lock = threading.Lock()
        self._allocated_count = 0
        self._on_empty: Callable[[], None] | None = None

    @property
    def segment_numbers(self) -> list[int]:
        """The numbers of all."""
        return list(self._segments)

    def allocate(self, nbytes: int) -> B | None:
        """A block of at least so many bytes; None where there is no space."""
        blocks = self.allocate_all((nbytes,))
        return None if blocks is None else blocks[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[B] | None:
        """A block of at least so many bytes for each of several sizes; None where there is no space for all."""
        places = self._allocate_ranges(sizes)
        return None if places is None else self._make_blocks(places)

    def allocate_at(self, places: Sequence[SegmentRange]) -> list[B] | None:
        """A block at each of several places where blocks were before; None where one of them is in use."""
        return self._make_blocks(places) if self._allocate_exact_ranges(places) else None

    def locate_address(self, address: int) -> tuple[int, int] | None:
        """The segment and the offset of what begins at an address; None where the server cannot read it."""
        for part in self._segments.values():
            if part.address <= address < part.address + part.nbytes:
                offset = address - part.address
                return None if offset % ALIGNMENT else (part.number, offset)
        return None

    def get_address(self, place: SegmentRange) -> int:
        """That at which a place begins."""
        return self._segments[place.segment].address + place.offset

    def queue_return(self, place: SegmentRange) -> None:
        """The last view of a place is gone."""
        self._returned_ranges.append(place)
        if self._on_empty is not None:
            self._check_empty()

    def call_when_empty(self, then: Callable[[], None]) -> None:
        """Call this once no place is in use, which may be now; nothing may be taken from here on."""
        self._on_empty = then
        self._check_empty()

    def remove_idle_segments(self) -> list[int]:
        """Forget all segments in which no place is in use; their numbers, for the caller to free them."""
        with self._lock:
            self._collect_returned()
            self._merge_cached()
            idle = {number: part for number, part in self._segments.items() if part.free_ranges.is_all_free}
            self._segments = {number: part for number, part in self._segments.items() if number not in idle}
            self.nbytes -= sum([part.nbytes for part in idle.values()])
        return list(idle)

    @abstractmethod
    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[B]:
        """What keeps each of these places, and notes its return."""

    def _add_segment(self, part: MappedSegment) -> None:
        with self._lock:
            if part.number in self._segments:
                raise ValueError("a new segment has the number of another")
            # Other threads may be looking through it.
            self._segments = {**self._segments, part.number: part}
            self.nbytes += part.nbytes

    def _allocate_ranges(self, sizes: Sequence[int]) -> Sequence[SegmentRange] | None:
        """Places of at least so many bytes, taken, with the lowest addresses; none where not all fit."""
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
        """Take just these; False, and none is taken, where not all of them are free."""
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
        # The thread that holds the lock while another place returns checks again.
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
