"""Memory that two processes share: a sealed anonymous file (memfd), whose descriptor is passed on.

It cannot be shrunk, so accesses to a mapping never fault.  Its pages are allocated in advance unless the segment
is created as lazy.  A mapping cannot be revoked, but `HostSegment.discard_content` removes the content.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from typing import TypeVar

from normserve.memory.available_memory import read_available_bytes

PAGE_BYTES = mmap.PAGESIZE

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Since Linux 6.3: its content must not be executable.
_MFD_NOEXEC_SEAL = 8


_S = TypeVar("_S", bound="HostSegment")


class HostSegment(mmap.mmap):
    """A mapping of host memory that several processes share.  It is unmapped once it has no views.

    A `memoryview` of the segment keeps it mapped.
    """

    def discard_content(self) -> None:
        """Remove the content and the pages from all mappings, which read as zeros from then on."""
        with contextlib.suppress(OSError, ValueError):
            self.madvise(mmap.MADV_REMOVE)


def make_segment(nbytes: int, kind: type[_S], *, is_populated: bool = True) -> tuple[int, _S]:
    """Create shared memory of zeros and map it; return its file descriptor, which the caller must close,
    and the mapping.

    Args:
        nbytes: rounded up to whole pages.
        kind: the class of the mapping: `HostSegment`, or a subclass.
        is_populated: allocate all pages now, and not each page at its first write.

    Raises:
        MemoryError: there is not enough memory.
    """
    nbytes = round_up_to_pages(nbytes)
    # The operating system would take pages until there are none, and then end some process.
    if nbytes > read_available_bytes():
        raise MemoryError(f"there is no shared memory of {nbytes} bytes")
    descriptor = _create_memfd()
    try:
        if is_populated:
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, _map_descriptor(descriptor, nbytes, kind, is_there_at_once=is_populated)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"there is no shared memory of {nbytes} bytes: {error.strerror}") from None
    except BaseException:
        os.close(descriptor)
        raise


def map_segment(descriptor: int, nbytes: int | None = None, *, is_populated: bool = True) -> HostSegment:
    """Map shared memory of another process by its file descriptor, which the caller still has to close.

    Args:
        nbytes: how many bytes to map, from the first one; None maps all bytes of the memory.
        is_populated: as in `make_segment`.

    Raises:
        ValueError: the memory is not sealed against shrinking, has huge pages, or has fewer bytes.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError("shared memory must be sealed against shrinking, this is not")
        # Whoever touches a huge page when none is left gets a signal.
        if os.fstatvfs(descriptor).f_bsize != PAGE_BYTES:
            raise ValueError("shared memory must have no huge pages, this has")
        if size < (nbytes or 1):
            raise ValueError(f"shared memory must have at least {nbytes or 1} bytes, this has {size}")
        return _map_descriptor(descriptor, nbytes or size, HostSegment, is_there_at_once=is_populated)
    except OSError as error:
        raise ValueError(f"the descriptor is not of shared memory: {error.strerror}") from None


def round_up_to_pages(nbytes: int) -> int:
    """Round a size up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


def _create_memfd() -> int:
    """Create an anonymous file in memory that can be sealed, and is not executable if the operating system supports
    that.

    Raises:
        MemoryError: the operating system refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("normserve", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise MemoryError(f"there is no shared memory: {error.strerror}") from None
    return os.memfd_create("normserve", flags)


def _map_descriptor(descriptor: int, nbytes: int, kind: type[_S], *, is_there_at_once: bool) -> _S:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_there_at_once else 0)
    return kind(descriptor, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
