"""The slabs of memory for request bodies and results."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normserve.memory.host_segments import HostSegment

Bytes = NDArray[np.uint8]

_SMALLEST_BYTES = 64 * 1024


class _SlabLease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The memory of a borrowed slab, which returns to the pool when its last view is gone.

    Not only the request refers to the memory: a transport may still send from it, and a device may
    still read it for a client that has disconnected.  So a slab is not returned explicitly, but with
    its last view.
    """

    memory: Bytes | None = None
    returned_slabs: "queue.SimpleQueue[Bytes] | None" = None

    def __del__(self) -> None:
        if self.memory is not None and self.returned_slabs is not None:
            # Reentrant, unlike a lock: this may run within any allocation of any thread.
            self.returned_slabs.put(self.memory)


def get_slab_memory(view: memoryview) -> Bytes | None:
    """Return the memory that the source of slabs allocated for a view's slab; None for other views."""
    return view.obj.memory if isinstance(view.obj, _SlabLease) else None


def allocate_plain(nbytes: int) -> Bytes:
    """Allocate pageable, untouched memory, in huge pages where the operating system provides them."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class SlabAllocator:
    """The function by which a pool allocates memory for new slabs, and the properties of that memory.

    Attributes:
        allocate: allocates the memory, or raises MemoryError.
        sizes_per_doubling: how many slab sizes there are for each power of two.
        is_slow: whether the event loop should allocate in another thread.
        allocate_segment: allocates memory that other processes map as well; None where there are none.
    """

    allocate: Callable[[int], Bytes]
    sizes_per_doubling: int
    is_slow: bool
    allocate_segment: Callable[[int], HostSegment] | None = None


# With four sizes at most a fifth of a slab is unused, and a later body of about this length can reuse it.
PLAIN = SlabAllocator(allocate_plain, sizes_per_doubling=4, is_slow=False)


class SlabPool:
    """A pool of host memory in slabs: slabs that are no longer used are kept, and borrowed again.

    Slabs in use are bounded by the permits of the borrowers, idle ones by `max_idle_bytes`.  Any thread
    may borrow and return slabs.

    Attributes:
        source: the allocator of new slabs; a device's driver may provide a better one.
    """

    def __init__(self, *, max_idle_bytes: int, source: SlabAllocator = PLAIN) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._returned: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._idle: dict[int, deque[Bytes]] = {}  # by size, in order of last use
        self._idle_bytes = 0
        self._used_bytes = 0
        self.source = source

    def borrow(self, nbytes: int) -> memoryview:
        """Borrow an idle slab of at least `nbytes`, or a new one; it returns to the pool when its last view is
        gone.

        Raises:
            MemoryError: there is no more.
        """
        size = _compute_slab_bytes(nbytes, self.source.sizes_per_doubling)
        with self._lock:
            self._collect_returned()
            memory = self._take_idle(size)
            self._used_bytes += size
        try:
            memory = self.source.allocate(size) if memory is None else memory
        except BaseException:
            with self._lock:
                self._used_bytes -= size
            raise
        return self._make_lease(memory)

    def borrow_idle(self, nbytes: int) -> memoryview | None:
        """Borrow an idle slab of at least `nbytes`; None if no slab of the smallest fitting size is idle."""
        size = _compute_slab_bytes(nbytes, self.source.sizes_per_doubling)
        with self._lock:
            self._collect_returned()
            memory = self._take_idle(size)
            if memory is None:
                return None
            self._used_bytes += size
        return self._make_lease(memory)

    def has_idle(self, nbytes: int) -> bool:
        """Return whether a slab of at least `nbytes` could be borrowed now without allocating a new one."""
        with self._lock:
            self._collect_returned()
            return bool(self._idle.get(_compute_slab_bytes(nbytes, self.source.sizes_per_doubling)))

    def _make_lease(self, memory: Bytes) -> memoryview:
        lease = memory.view(_SlabLease)
        lease.memory, lease.returned_slabs = memory, self._returned
        return lease.data

    @property
    def used_bytes(self) -> int:
        """The bytes of all borrowed slabs."""
        with self._lock:
            self._collect_returned()
            return self._used_bytes

    @property
    def idle_bytes(self) -> int:
        """The bytes of all slabs that are kept for reuse."""
        with self._lock:
            self._collect_returned()
            return self._idle_bytes

    def _take_idle(self, size: int) -> Bytes | None:
        """Take the last returned idle slab of exactly this size out of the pool; None if there is none.

        The caller holds the lock, and counts the slab as used.
        """
        idle = self._idle.get(size)
        if not idle:
            return None
        self._idle_bytes -= size
        return idle.pop()

    def _collect_returned(self) -> None:
        """Count the returned slabs as idle.  If the idle slabs exceed their limit, free slabs of the sizes that
        were unused for longest.
        """
        while not self._returned.empty():
            memory = self._returned.get()
            self._used_bytes -= memory.nbytes
            self._idle_bytes += memory.nbytes
            idle = self._idle.pop(memory.nbytes, None) or deque()
            idle.append(memory)
            self._idle[memory.nbytes] = idle
        while self._idle_bytes > self._max_idle_bytes:
            size, idle = next(iter(self._idle.items()))
            if idle:
                idle.popleft()
                self._idle_bytes -= size
            if not idle:
                del self._idle[size]


def _compute_slab_bytes(nbytes: int, steps: int) -> int:
    """Return the smallest slab size that holds `nbytes`; between two powers of two there are `steps` sizes."""
    if nbytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    step = (1 << (nbytes - 1).bit_length()) // (2 * steps)
    return -(-nbytes // step) * step
