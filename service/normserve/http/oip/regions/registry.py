"""The regions that clients have registered, by name."""

import queue
from dataclasses import dataclass
from typing import Any, NamedTuple

from normserve.errors import OverloadedError, UnusableRegionError
from normserve.http.oip.regions.files import RegionFile
from normserve.http.oip.regions.folder import Folder

MOST_REGIONS = 1024
"""At once, of all clients; each takes a descriptor."""

_LONGEST_NAME = 256
_RETRY_AFTER_S = 5.0

OFF = "this server shares no memory by names; its operator can allow that with --oip-shared-memory PREFIX"
NO_CUDA = (
    "this server registers no CUDA shared memory: register system shared memory, or send tensors as binary data"
)


class Span(NamedTuple):
    """A part of a region.

    Attributes:
        offset: in the region, in bytes.
    """

    region: RegionFile
    offset: int
    nbytes: int

    def overlaps(self, other: "Span") -> bool:
        """Whether they have a byte in common, as far as the registrations tell."""
        return (
            self.region.is_of_the_file(other.region)
            and self.region.start + self.offset < other.region.start + other.offset + other.nbytes
            and other.region.start + other.offset < self.region.start + self.offset + self.nbytes
        )


@dataclass(frozen=True, slots=True)
class _Name:
    """Clients with keys of different names have names of their own."""

    owner: str | None
    name: str


class Regions:
    """Registers regions and finds them; belongs to the event loop's thread, except for `open`.

    A region that was unregistered stays open for the requests that have found it, and counts until they are done.
    """

    def __init__(self, folder: Folder | None, max_bytes: int, max_regions: int = MOST_REGIONS) -> None:
        """Args:
        folder: where regions are; None where none may be registered.
        max_bytes, max_regions: of all regions at once.
        """
        self._folder = folder
        self._max_bytes, self._max_regions = max_bytes, max_regions
        self._regions: dict[_Name, RegionFile] = {}
        self._closed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open_bytes = self._open_regions = 0

    @property
    def is_on(self) -> bool:
        """Whether regions may be registered."""
        return self._folder is not None

    @property
    def open_bytes(self) -> int:
        """Of all regions that are open."""
        self._collect()
        return self._open_bytes

    @property
    def open_regions(self) -> int:
        """How many are open: registered, or unregistered and in use."""
        self._collect()
        return self._open_regions

    def open(self, name: str, key: str, start: int, nbytes: int) -> RegionFile:
        """Open what is to be registered; by any thread.

        Raises:
            UnusableRegionError: it cannot be registered under this name, or at all.
        """
        if self._folder is None:
            raise UnusableRegionError(OFF)
        if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise UnusableRegionError(f"a region's name must have 1 to {_LONGEST_NAME} printable characters")
        return self._folder.open(key, start, nbytes)

    def register(self, owner: str | None, name: str, region: RegionFile) -> None:
        """Give an open region a name.

        Args: owner: the name of the API key that the client has given, None where none is asked for.

        Raises:
            UnusableRegionError: there is a region of this name.
            OverloadedError: there are too many, or too many bytes of them.
        """
        named = _Name(owner, name)
        if named in self._regions:
            raise UnusableRegionError(f"a region with the name {_label(name)} is registered: unregister it first")
        self._collect()
        if self._open_regions >= self._max_regions:
            raise OverloadedError(
                f"no more than {self._max_regions} regions are registered at once", _RETRY_AFTER_S
            )
        if self._open_bytes + region.nbytes > self._max_bytes:
            raise OverloadedError(
                f"{region.nbytes} more bytes do not fit beside {self._open_bytes} of the regions that are"
                f" registered: no more than {self._max_bytes} are",
                _RETRY_AFTER_S,
            )
        region.home = self._closed
        self._open_regions += 1
        self._open_bytes += region.nbytes
        self._regions[named] = region

    def unregister(self, owner: str | None, name: str | None = None) -> None:
        """Forget a region, or all that this owner has; what does not exist is forgotten already."""
        if name is not None:
            self._regions.pop(_Name(owner, name), None)
            return
        for named in [each for each in self._regions if each.owner == owner]:
            del self._regions[named]

    def find(self, owner: str | None, name: str, offset: int, nbytes: int) -> Span:
        """A part of a region, for as long as the caller needs it.

        Raises:
            UnusableRegionError: there is no such region, it has no such part, or its file has it no more.
        """
        region = self._regions.get(_Name(owner, name))
        if region is None:
            raise UnusableRegionError(_unknown(name) if self.is_on else OFF)
        # Of ever so many digits, a Python integer does not wrap.
        if offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
            raise UnusableRegionError(
                f"{nbytes} bytes at offset {offset} do not lie within the {region.nbytes} bytes of the region"
                f" {_label(name)}"
            )
        region.require_present(offset, nbytes)
        return Span(region, offset, nbytes)

    def status(self, owner: str | None, name: str | None = None) -> list[dict[str, Any]]:
        """What is registered, as the protocol tells it: all, or the one of that name.

        Raises:
            UnusableRegionError: there is no such region.
        """
        if name is None:
            return [_told(named.name, region) for named, region in self._regions.items() if named.owner == owner]
        region = self._regions.get(_Name(owner, name))
        if region is None:
            raise UnusableRegionError(_unknown(name) if self.is_on else OFF)
        return [_told(name, region)]

    def _collect(self) -> None:
        while not self._closed.empty():
            self._open_bytes -= self._closed.get()
            self._open_regions -= 1


def _told(name: str, region: RegionFile) -> dict[str, Any]:
    return {"name": name, "key": region.key, "offset": region.start, "byte_size": region.nbytes}


def _unknown(name: str) -> str:
    return f"no region with the name {_label(name)} is registered"


def _label(name: str) -> str:
    return repr(name[:64])
