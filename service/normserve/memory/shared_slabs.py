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

    memory: SharedSlab
    offset: int


class SharedSlabRegistry:
    """Makes such memory, and finds what lies in it.  Memory may come and go on any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        self._live: dict[int, SharedSlab] = {}  # by address
        # Reentrant, unlike the lock: memory ends within any allocation of any thread.
        self._ended: queue.SimpleQueue[SharedSlab] = queue.SimpleQueue()
        self._untold: list[int] = []

    def source(self) -> SlabAllocator:
        """Of slabs, until a device's driver knows a better one."""
        return SlabAllocator(self.allocate, steps=4, is_slow=False, segments=self.segment)

    def allocate(self, nbytes: int) -> Bytes:
        """New memory for a slab.

        Raises:
            MemoryError: there is no more.
        """
        return np.frombuffer(self.segment(nbytes), np.uint8)[:nbytes]

    def segment(self, nbytes: int) -> HostSegment:
        """New memory of at least so many bytes; it ends with its last view.

        Raises:
            MemoryError: there is no more.
        """
        descriptor, segment = make_segment(nbytes, HostSegment, is_there_at_once=False)
        memory = SharedSlab(next(self._numbers), descriptor, _get_address(memoryview(segment)), len(segment))
        weakref.finalize(segment, self._end, memory)
        with self._lock:
            # What lay at this address before has ended, or it would not be free.
            self._collect()
            bisect.insort(self._addresses, memory.address)
            self._live[memory.address] = memory
        return segment

    def locate(self, view: memoryview) -> SlabLocation | None:
        """Where a view's bytes lie; None if it is not in such memory."""
        address = _get_address(view)
        with self._lock:
            self._collect()
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            memory = self._live[self._addresses[index]]
        offset = address - memory.address
        return SlabLocation(memory, offset) if offset + view.nbytes <= memory.nbytes else None

    def ended(self) -> list[int]:
        """The numbers of the memory that has ended since this was asked last."""
        with self._lock:
            self._collect()
            untold, self._untold = self._untold, []
        return untold

    def _end(self, memory: SharedSlab) -> None:
        os.close(memory.descriptor)
        self._ended.put(memory)

    def _collect(self) -> None:
        while not self._ended.empty():
            memory = self._ended.get()
            del self._live[memory.address]
            self._addresses.remove(memory.address)
            self._untold.append(memory.number)


def _get_address(view: memoryview) -> int:
    """Where a view begins in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
