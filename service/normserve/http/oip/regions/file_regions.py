"""Regions of system shared memory: parts of open files that their clients may change at any time.

`SharedMemoryFolder` opens the files that clients may register.
"""

import errno
import os
import queue
import re
import stat
from pathlib import Path
from typing import Any

from normserve.errors import StorageError, UnusableRegionError
from normserve.http.oip.regions.region import Kind

SHARED_MEMORY = Path("/dev/shm")
"""The system's folder of named shared memory."""

# Names are restricted by a list of allowed characters, not of forbidden ones.
_KEY = re.compile(r"/?([A-Za-z0-9_-][A-Za-z0-9._-]{0,249})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAPPINGS = Path("/proc/self/maps")
_REFUSED = "the key is of no shared memory that this server may use"


class FileRegion:
    """A region of a client's shared memory file, open while a registration, request or copy refers to it.

    It is read and written by system calls, never mapped: if the client has truncated the file, a call
    returns an error, whereas an access to a mapping would kill the process.

    Attributes:
        key: the file's name, as the client sent it.
        start: offset of the region in the file, in bytes.
        nbytes: the region's size in bytes.
        closed_sizes: receives the region's size once it is closed; a queue, because unlike a lock it is
            reentrant.
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

    def require_usable_range(self, offset: int, nbytes: int) -> None:
        """Require that the file still contains this range of the region, since clients may truncate it.

        Raises:
            UnusableRegionError: the file is too short.
        """
        size = os.fstat(self._descriptor).st_size
        if self.start + offset + nbytes > size:
            raise UnusableRegionError(
                f"the region's file must have {self.start + offset + nbytes} bytes, it has become {size} bytes long"
            )

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes from the region to `into`.

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
        """Copy `data` to the region.

        Args:
            offset: offset in the region, in bytes.
            data: a view of single bytes.

        Raises:
            UnusableRegionError: the file is too short; it is not extended.
            StorageError: there is no memory for the file.
        """
        self.require_usable_range(offset, len(data))
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


class SharedMemoryFolder:
    """A folder of shared memory files; clients may use the files whose names begin with a prefix.

    Attributes:
        prefix: the required beginning of the names.
    """

    def __init__(self, prefix: str, path: Path = SHARED_MEMORY) -> None:
        """Raises: OSError: there is no such folder."""
        self.prefix = prefix
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._descriptor).st_dev
        self._uid = os.geteuid()

    def open_region(self, key: str, start: int, nbytes: int) -> FileRegion:
        """Open a shared memory file, and return a byte range of the file as a region.

        Args:
            key: the file's name, with or without a slash before it.
            start: offset of the region in the file, in bytes.
            nbytes: the region's size in bytes.

        Raises:
            UnusableRegionError: the name is not allowed, there is no such file, the server may not use it,
                or the region exceeds it.  The message does not say why an existing file may not be used.
        """
        name = self._parse_key(key)
        try:
            # Opening something that is not a regular file can have side effects.
            self._require_usable_file(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
            descriptor = os.open(name, _FLAGS, dir_fd=self._descriptor)
        except OSError:
            raise UnusableRegionError(_REFUSED) from None
        region = FileRegion(descriptor, key, start, nbytes)
        status = os.fstat(descriptor)
        self._require_usable_file(status)
        if _is_mapped_here(status):
            raise UnusableRegionError(_REFUSED)
        if not nbytes or start + nbytes > status.st_size:
            raise UnusableRegionError(
                f"a region must lie within its file and have at least 1 byte; offset {start} and byte_size {nbytes}"
                f" do not fit into {status.st_size} bytes"
            )
        return region

    def close(self) -> None:
        """Close the folder; nothing can be opened afterwards."""
        os.close(self._descriptor)

    def _parse_key(self, key: str) -> str:
        """Return the file name that a client's key names, without a slash before it.

        Raises:
            UnusableRegionError: the name is not allowed.
        """
        found = _KEY.fullmatch(key)
        if found is None or not found[1].startswith(self.prefix):
            raise UnusableRegionError(
                f"a key must begin with {self.prefix!r}, with or without a slash before it, and have up to 250"
                " letters, digits and characters of '._-'"
            )
        return found[1]

    def _require_usable_file(self, status: os.stat_result) -> None:
        """Require a regular file without other hard links, in this folder's file system and owned by the server's
        user.

        Raises:
            UnusableRegionError: clients may not use this file.
        """
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_dev != self._device
            or status.st_uid != self._uid
            or status.st_nlink > 1
        ):
            raise UnusableRegionError(_REFUSED)


def _is_mapped_here(status: os.stat_result) -> bool:
    """Return whether this process has mapped the file itself.

    Clients must not write to such a file, which a library may have created under any name.
    """
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}".encode()
    inode = b"%d" % status.st_ino
    with _MAPPINGS.open("rb") as mappings:
        return any(line.split(None, 5)[3:5] == [device, inode] for line in mappings)
