"""The memory for request bodies and results."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normserve.memory.segments import HostSegment

Bytes = NDArray[np.uint8]

_SMALLEST_BYTES = 64 * 1024


class _SlabLease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A slab's memory as one borrower sees it: it returns to the pool with the last view of it.

    What refers to the memory is not only the request: a transport that still sends from it, a device that still
    reads it for a client that has left.  So a slab is not returned explicitly, but with its last view.
    """

    memory: Bytes | None = None
    returned_slabs: "queue.SimpleQueue[Bytes] | None" = None

    def __del__(self) -> None:
        if self.memory is not None and self.returned_slabs is not None:
            # Reentrant, unlike a lock: this may run within any allocation of any thread.
            self.returned_slabs.put(self.memory)


def get_slab_memory(view: memoryview) -> Bytes | None:
    """The memory of the slab that a view is of, as its source made it; None of what is no slab."""
    return view.obj.memory if isinstance(view.obj, _SlabLease) else None


def allocate_plain(nbytes: int) -> Bytes:
    """Memory as the operating system gives it: in huge pages where it has them, and untouched."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class SlabAllocator:
    """Where the memory of new slabs comes from.

    Attributes:
        allocate: makes it, or raises MemoryError.
        sizes_per_doubling: in how many sizes to each power of two.
        is_slow: it takes so long that the event loop has another thread make it.
        allocate_segment: what other processes map as well, in which the memory is to be; None where there are none.
    """

    allocate: Callable[[int], Bytes]
    sizes_per_doubling: int
    is_slow: bool
    allocate_segment: Callable[[int], HostSegment] | None = None


# In four steps at most a fifth of a slab lies idle, and the next body of about the same length finds it.
PLAIN = SlabAllocator(allocate_plain, sizes_per_doubling=4, is_slow=False)


class SlabPool:
    """Lends slabs and keeps returned ones for the next borrower.

    Slabs in use are bounded by the permits of those who borrow, idle ones by `max_idle_bytes`.  Any thread may
    borrow and give back.

    Attributes:
        source: of new slabs; a device's driver may know a better one.
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
        """Borrow a slab of at least `nbytes`; it is lent until the last view of it is gone.

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
        """Borrow a slab of at least `nbytes` if one of that size is idle."""
        size = _compute_slab_bytes(nbytes, self.source.sizes_per_doubling)
        with self._lock:
            self._collect_returned()
            memory = self._take_idle(size)
            if memory is None:
                return None
            self._used_bytes += size
        return self._make_lease(memory)

    def has_idle(self, nbytes: int) -> bool:
        """Whether a slab for so many bytes would be lent without making one."""
        with self._lock:
            self._collect_returned()
            return bool(self._idle.get(_compute_slab_bytes(nbytes, self.source.sizes_per_doubling)))

    def _make_lease(self, memory: Bytes) -> memoryview:
        lease = memory.view(_SlabLease)
        lease.memory, lease.returned_slabs = memory, self._returned
        return lease.data

    @property
    def used_bytes(self) -> int:
        """Of slabs that are lent."""
        with self._lock:
            self._collect_returned()
            return self._used_bytes

    @property
    def idle_bytes(self) -> int:
        """Of slabs that wait for a borrower."""
        with self._lock:
            self._collect_returned()
            return self._idle_bytes

    def _take_idle(self, size: int) -> Bytes | None:
        idle = self._idle.get(size)
        if not idle:
            return None
        self._idle_bytes -= size
        return idle.pop()

    def _collect_returned(self) -> None:
        """Collect returned slabs, and free those beyond the limit, the longest unused sizes first."""
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
    """The smallest slab that holds `nbytes`."""
    if nbytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    step = (1 << (nbytes - 1).bit_length()) // (2 * steps)
    return -(-nbytes // step) * step
