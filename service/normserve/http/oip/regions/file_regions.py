"""One region of system shared memory: a part of an open file that its client may change at any time."""

import errno
import os
import queue
from typing import Any

from normserve.errors import StorageError, UnusableRegionError
from normserve.http.oip.regions.region import Kind


class FileRegion:
    """A region that stays open while anything refers to it: a registration, a request, a thread that reads.

    It is read and written by system calls, never mapped: if the client has truncated the file, a call returns an
    error, whereas an access to a mapping would kill the process.

    Attributes:
        key: the file's name, as the client sent it.
        start: offset of the region in the file, in bytes.
        nbytes: the region's size in bytes.
        closed_sizes: receives the region's size once it is closed; a queue, because unlike a lock it is reentrant.
    """

    kind: Kind = "system"
    closed_sizes: "queue.SimpleQueue[int] | None" = None

    def __init__(self, descriptor: int, key: str, start: int, nbytes: int) -> None:
        """Args: descriptor: the file's descriptor, which is closed with the region."""
        self._descriptor = descriptor
        self.key, self.start, self.nbytes = key, start, nbytes
        self._inode = os.fstat(descriptor).st_ino

    def describe(self) -> dict[str, Any]:
        """Return the region's fields in the protocol, without its name."""
        return {"key": self.key, "offset": self.start, "byte_size": self.nbytes}

    def is_in_same_memory(self, other: object) -> bool:
        """Return whether both regions are parts of one file."""
        return isinstance(other, FileRegion) and self._inode == other._inode

    def require_range(self, offset: int, nbytes: int) -> None:
        """Raises: UnusableRegionError: the file no longer has these bytes of the region."""
        size = os.fstat(self._descriptor).st_size
        if self.start + offset + nbytes > size:
            raise UnusableRegionError(
                f"the region's file must have {self.start + offset + nbytes} bytes, it has become {size} bytes long"
            )

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes of the region.

        Args:
            offset: offset in the region, in bytes.
            into: the target; its length is the number of bytes copied.

        Raises:
            UnusableRegionError: the file is too short.
        """
        position, end = self.start + offset, self.start + offset + len(into)
        while position < end:
            count = os.preadv(self._descriptor, [into[len(into) - (end - position) :]], position)
            if not count:
                raise UnusableRegionError("the region's file has become shorter than the part to be read")
            position += count

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into the region.

        Args:
            offset: offset in the region, in bytes.
            data: a view of single bytes.

        Raises:
            UnusableRegionError: the file is too short; it is not extended.
            StorageError: there is no memory for the file.
        """
        self.require_range(offset, len(data))
        position, end = self.start + offset, self.start + offset + len(data)
        try:
            while position < end:
                position += os.pwrite(self._descriptor, data[len(data) - (end - position) :], position)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise StorageError("there is no memory for the pages of the region to write to") from None
            # For example sealed against writing: caused by the client itself.
            raise UnusableRegionError(f"the region's file cannot be written: {error.strerror}") from None

    def __del__(self) -> None:
        os.close(self._descriptor)
        if self.closed_sizes is not None:
            self.closed_sizes.put(self.nbytes)
