"""Slabs that other processes of the server map: each is a segment, identified by a number.

Front ends receive bodies directly into them and send results directly from them.
"""

import bisect
import itertools
import os
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from normserve.memory.host_segments import HostSegment, make_segment
from normserve.memory.slabs import Bytes, SlabAllocator


@dataclass(frozen=True, slots=True)
class SharedSlab:
    """The memory of one slab, with the descriptor by which other processes map it.

    Attributes:
        number: identifies the slab; numbers are never reused.
        descriptor: of the slab's file; open as long as the memory is mapped here.
        address, nbytes: of the mapping in this process.
    """

    number: int
    descriptor: int
    address: int
    nbytes: int


class SlabLocation(NamedTuple):
    """The location of bytes in a shared slab."""

    slab: SharedSlab
    offset: int


class SharedSlabRegistry:
    """The slabs of this process that other processes can map: it allocates them, and locates bytes in them.

    Slabs may be made and freed on any thread.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        self._slabs_by_address: dict[int, SharedSlab] = {}  # by address
        # Reentrant, unlike the lock: memory ends within any allocation of any thread.
        self._ended_slabs: queue.SimpleQueue[SharedSlab] = queue.SimpleQueue()
        self._unreported_numbers: list[int] = []

    def make_allocator(self) -> SlabAllocator:
        """Make the allocator with which a slab pool allocates its slabs in shared memory.

        A backend may replace it by an allocator of pinned slabs.
        """
        return SlabAllocator(
            self.allocate_slab, sizes_per_doubling=4, is_slow=False, allocate_segment=self.allocate_segment
        )

    def allocate_slab(self, nbytes: int) -> Bytes:
        """Allocate the memory of one new shared slab, as an array of `nbytes` bytes.

        Raises:
            MemoryError: there is no more.
        """
        return np.frombuffer(self.allocate_segment(nbytes), np.uint8)[:nbytes]

    def allocate_segment(self, nbytes: int) -> HostSegment:
        """Allocate a shared segment of at least `nbytes` for a new slab, and register it until its last view
        is gone.

        Raises:
            MemoryError: there is no more.
        """
        descriptor, segment = make_segment(nbytes, HostSegment, is_populated=False)
        memory = SharedSlab(next(self._numbers), descriptor, _get_address(memoryview(segment)), len(segment))
        weakref.finalize(segment, self._close_slab, memory)
        with self._lock:
            # An earlier slab at this address has ended, since the address is free.
            self._forget_freed_slabs()
            bisect.insort(self._addresses, memory.address)
            self._slabs_by_address[memory.address] = memory
        return segment

    def locate(self, view: memoryview) -> SlabLocation | None:
        """Return the slab and offset of a view's bytes; None if they are not in a shared slab."""
        address = _get_address(view)
        with self._lock:
            self._forget_freed_slabs()
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            memory = self._slabs_by_address[self._addresses[index]]
        offset = address - memory.address
        return SlabLocation(memory, offset) if offset + view.nbytes <= memory.nbytes else None

    def take_freed_numbers(self) -> list[int]:
        """Return the numbers of the slabs that were freed since the last call, so that other processes can
        unmap them.
        """
        with self._lock:
            self._forget_freed_slabs()
            untold, self._unreported_numbers = self._unreported_numbers, []
        return untold

    def _close_slab(self, memory: SharedSlab) -> None:
        os.close(memory.descriptor)
        self._ended_slabs.put(memory)

    def _forget_freed_slabs(self) -> None:
        """Remove freed slabs from the look-up by address, and note their numbers for `take_freed_numbers`.

        The caller holds the lock.
        """
        while not self._ended_slabs.empty():
            memory = self._ended_slabs.get()
            del self._slabs_by_address[memory.address]
            self._addresses.remove(memory.address)
            self._unreported_numbers.append(memory.number)


def _get_address(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
