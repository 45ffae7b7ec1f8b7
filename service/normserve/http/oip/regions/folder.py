"""The folder of the files that clients may register as system shared memory."""

import os
import re
import stat
from pathlib import Path

from normserve.errors import UnusableRegionError
from normserve.http.oip.regions.file_regions import FileRegion

SHARED_MEMORY = Path("/dev/shm")
"""The system's folder of named shared memory."""

# Names are restricted by a list of allowed characters, not of forbidden ones.
_KEY = re.compile(r"/?([A-Za-z0-9_-][A-Za-z0-9._-]{0,249})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAPPINGS = Path("/proc/self/maps")
_REFUSED = "the key is of no shared memory that this server may use"


class SharedMemoryFolder:
    """Opens files of one folder whose names begin with a prefix.

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
        """Open a region of a file.

        Args:
            key: the file's name, with or without a slash before it.
            start: offset of the region in the file, in bytes.
            nbytes: the region's size in bytes.

        Raises:
            UnusableRegionError: the name is not allowed, there is no such file, the server may not use it, or the
                region exceeds it.  The message does not say why an existing file may not be used.
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
        found = _KEY.fullmatch(key)
        if found is None or not found[1].startswith(self.prefix):
            raise UnusableRegionError(
                f"a key must begin with {self.prefix!r}, with or without a slash before it, and have up to 250"
                " letters, digits and characters of '._-'"
            )
        return found[1]

    def _require_usable_file(self, status: os.stat_result) -> None:
        """Require a regular file on the same file system, of this user, without hard links."""
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_dev != self._device
            or status.st_uid != self._uid
            or status.st_nlink > 1
        ):
            raise UnusableRegionError(_REFUSED)


def _is_mapped_here(status: os.stat_result) -> bool:
    """Return whether this process has mapped the file: a library may have created it, under any name."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}".encode()
    inode = b"%d" % status.st_ino
    with _MAPPINGS.open("rb") as mappings:
        return any(line.split(None, 5)[3:5] == [device, inode] for line in mappings)
