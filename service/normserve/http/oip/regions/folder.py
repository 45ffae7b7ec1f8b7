"""The files that clients may register as system shared memory, and how they are opened."""

import os
import re
import stat
from pathlib import Path

from normserve.errors import UnusableRegionError
from normserve.http.oip.regions.files import RegionFile

SHARED_MEMORY = Path("/dev/shm")
"""Where the system keeps shared memory that has a name."""

# What a name may be is said by what it may hold, and not by what it may not.
_KEY = re.compile(r"/?([A-Za-z0-9_-][A-Za-z0-9._-]{0,249})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAPPINGS = Path("/proc/self/maps")
_REFUSED = "the key is of no shared memory that this server may use"


class Folder:
    """Opens files of one folder whose names begin with a prefix.

    Attributes:
        prefix: of the names.
    """

    def __init__(self, prefix: str, path: Path = SHARED_MEMORY) -> None:
        """Raises: OSError: there is no such folder."""
        self.prefix = prefix
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._descriptor).st_dev
        self._uid = os.geteuid()

    def open(self, key: str, start: int, nbytes: int) -> RegionFile:
        """Open a region of a file.

        Args:
            key: the file's name, with or without a slash before it.
            start: of the region in the file, in bytes.
            nbytes: of the region.

        Raises:
            UnusableRegionError: the name is not allowed, there is no such file, it is none that the server may use,
                or the region lies beyond its end.  Why a file that is there may not be used is not said.
        """
        name = self._name(key)
        try:
            # Opening alone can do something to what is no file.
            self._require_usable(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
            descriptor = os.open(name, _FLAGS, dir_fd=self._descriptor)
        except OSError:
            raise UnusableRegionError(_REFUSED) from None
        region = RegionFile(descriptor, key, start, nbytes)
        status = os.fstat(descriptor)
        self._require_usable(status)
        if _is_mapped(status):
            raise UnusableRegionError(_REFUSED)
        if not nbytes or start + nbytes > status.st_size:
            raise UnusableRegionError(
                f"a region must lie within its file and have at least 1 byte; offset {start} and byte_size {nbytes}"
                f" do not fit into {status.st_size} bytes"
            )
        return region

    def close(self) -> None:
        """Open no more."""
        os.close(self._descriptor)

    def _name(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None or not found[1].startswith(self.prefix):
            raise UnusableRegionError(
                f"a key must begin with {self.prefix!r}, with or without a slash before it, and have up to 250"
                " letters, digits and characters of '._-'"
            )
        return found[1]

    def _require_usable(self, status: os.stat_result) -> None:
        """A file, on the same file system, of this user, and with no second name, which others could have made."""
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_dev != self._device
            or status.st_uid != self._uid
            or status.st_nlink > 1
        ):
            raise UnusableRegionError(_REFUSED)


def _is_mapped(status: os.stat_result) -> bool:
    """Whether the file is memory of this process: a library may have made it, under whatever name."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}".encode()
    inode = b"%d" % status.st_ino
    with _MAPPINGS.open("rb") as mappings:
        return any(line.split(None, 5)[3:5] == [device, inode] for line in mappings)
