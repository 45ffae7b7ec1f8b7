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

from normserve.memory.segments import HostSegment, make_segment
from normserve.memory.slabs import Bytes, SlabAllocator


@dataclass(frozen=True, slots=True)
class SharedSlab:
    """One slab's memory, as other processes come to it.

    Attributes:
        number: names it; no other ever has the same.
        descriptor: of its file; open as long as the memory is there.
        address, nbytes: where it lies in this process.
    """

    number: int
    descriptor: int
    address: int
    nbytes: int


class SlabLocation(NamedTuple):
    """Where bytes lie: in which memory, from which of its bytes on."""

    slab: SharedSlab
    offset: int


class SharedSlabRegistry:
    """Makes such memory, and finds what lies in it.  Memory may come and go on any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        self._slabs_by_address: dict[int, SharedSlab] = {}  # by address
        # Reentrant, unlike the lock: memory ends within any allocation of any thread.
        self._ended_slabs: queue.SimpleQueue[SharedSlab] = queue.SimpleQueue()
        self._unreported_numbers: list[int] = []

    def make_source(self) -> SlabAllocator:
        """Of slabs, until a device's driver knows a better one."""
        return SlabAllocator(
            self.allocate, sizes_per_doubling=4, is_slow=False, allocate_segment=self.allocate_segment
        )

    def allocate(self, nbytes: int) -> Bytes:
        """New memory for a slab.

        Raises:
            MemoryError: there is no more.
        """
        return np.frombuffer(self.allocate_segment(nbytes), np.uint8)[:nbytes]

    def allocate_segment(self, nbytes: int) -> HostSegment:
        """New memory of at least so many bytes; it ends with its last view.

        Raises:
            MemoryError: there is no more.
        """
        descriptor, segment = make_segment(nbytes, HostSegment, is_there_at_once=False)
        memory = SharedSlab(next(self._numbers), descriptor, _get_address(memoryview(segment)), len(segment))
        weakref.finalize(segment, self._close_slab, memory)
        with self._lock:
            # What lay at this address before has ended, or it would not be free.
            self._remove_ended()
            bisect.insort(self._addresses, memory.address)
            self._slabs_by_address[memory.address] = memory
        return segment

    def locate(self, view: memoryview) -> SlabLocation | None:
        """Where a view's bytes lie; None if it is not in such memory."""
        address = _get_address(view)
        with self._lock:
            self._remove_ended()
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            memory = self._slabs_by_address[self._addresses[index]]
        offset = address - memory.address
        return SlabLocation(memory, offset) if offset + view.nbytes <= memory.nbytes else None

    def take_ended_numbers(self) -> list[int]:
        """The numbers of the memory that has ended since this was asked last."""
        with self._lock:
            self._remove_ended()
            untold, self._unreported_numbers = self._unreported_numbers, []
        return untold

    def _close_slab(self, memory: SharedSlab) -> None:
        os.close(memory.descriptor)
        self._ended_slabs.put(memory)

    def _remove_ended(self) -> None:
        while not self._ended_slabs.empty():
            memory = self._ended_slabs.get()
            del self._slabs_by_address[memory.address]
            self._addresses.remove(memory.address)
            self._unreported_numbers.append(memory.number)


def _get_address(view: memoryview) -> int:
    """Where a view begins in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
