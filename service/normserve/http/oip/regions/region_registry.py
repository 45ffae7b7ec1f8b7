"""The registered regions, by name."""

import queue
from dataclasses import dataclass
from typing import Any, NamedTuple

from normserve.errors import OverloadedError, UnusableRegionError
from normserve.http.oip.regions.file_regions import FileRegion, SharedMemoryFolder
from normserve.http.oip.regions.region import Kind, MemoryRegion

MOST_REGIONS = 1024
"""Limit of the open regions of all clients; each needs a descriptor."""

_LONGEST_NAME = 256
_RETRY_AFTER_S = 5.0

OFF = "this server shares no memory by names; its operator can allow that with --oip-shared-memory PREFIX"


class RegionRange(NamedTuple):
    """A byte range of an open region, for one tensor.

    Attributes:
        offset: offset of the range in the region, in bytes.
    """

    region: MemoryRegion
    offset: int
    nbytes: int

    def has_overlap(self, other: "RegionRange") -> bool:
        """Return whether the ranges have a byte in common.

        Ranges can overlap only in the same file, or if both are in CUDA memory.
        """
        return (
            self.region.is_in_same_memory(other.region)
            and self.region.start + self.offset < other.region.start + other.offset + other.nbytes
            and other.region.start + other.offset < self.region.start + self.offset + self.nbytes
        )


@dataclass(frozen=True, slots=True)
class _RegionName:
    """The name of a region, together with the API key to which it belongs; each key has its own names.

    Attributes:
        owner: the name of the API key; None if no key is required.
    """

    owner: str | None
    name: str


class RegionRegistry:
    """All open regions of clients' system and CUDA shared memory, which are found by API key and name.

    It belongs to the event loop's thread, except for `open_file_region`.  An unregistered region stays
    open for the requests that have found it, and counts until they have ended.
    """

    def __init__(
        self,
        folder: SharedMemoryFolder | None,
        max_bytes: int,
        max_regions: int = MOST_REGIONS,
        *,
        shares_device_memory: bool = False,
    ) -> None:
        """Args:
        folder: the folder of system shared memory; None if none may be registered.
        max_bytes, max_regions: limits of all open regions of both kinds.
        shares_device_memory: whether regions of CUDA memory may be registered.
        """
        self._folder = folder
        self._shares_device_memory = shares_device_memory
        self._max_bytes, self._max_regions = max_bytes, max_regions
        self._regions: dict[_RegionName, MemoryRegion] = {}
        self._closed_sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open_bytes = self._open_count = 0

    @property
    def is_enabled(self) -> bool:
        """Whether regions of system shared memory may be registered."""
        return self._folder is not None

    @property
    def open_bytes(self) -> int:
        """The bytes of all open regions."""
        self._collect_closed()
        return self._open_bytes

    @property
    def open_count(self) -> int:
        """The number of open regions: registered, or unregistered and in use."""
        self._collect_closed()
        return self._open_count

    def open_file_region(self, name: str, key: str, start: int, nbytes: int) -> FileRegion:
        """Open a region of system shared memory, which the caller then registers.

        Any thread may call this.

        Raises:
            UnusableRegionError: the memory cannot be registered under this name, or at all.
        """
        if self._folder is None:
            raise UnusableRegionError(OFF)
        require_region_name(name)
        return self._folder.open_region(key, start, nbytes)

    def register_region(self, owner: str | None, name: str, region: MemoryRegion) -> None:
        """Register an open region under a name.

        Args: owner: the name of the client's API key, None if no key is required.

        Raises:
            UnusableRegionError: there is a region of this name.
            OverloadedError: there are too many regions, or they have too many bytes.
        """
        named = _RegionName(owner, name)
        if named in self._regions:
            raise UnusableRegionError(f"a region with the name {name[:64]!r} is registered: unregister it first")
        self._collect_closed()
        if self._open_count >= self._max_regions:
            raise OverloadedError(
                f"no more than {self._max_regions} regions are registered at once", _RETRY_AFTER_S
            )
        if self._open_bytes + region.nbytes > self._max_bytes:
            raise OverloadedError(
                f"{region.nbytes} more bytes do not fit beside {self._open_bytes} of the regions that are"
                f" registered: no more than {self._max_bytes} are",
                _RETRY_AFTER_S,
            )
        region.closed_sizes = self._closed_sizes
        self._open_count += 1
        self._open_bytes += region.nbytes
        self._regions[named] = region

    def unregister_regions(self, owner: str | None, kind: Kind, name: str | None = None) -> None:
        """Unregister the owner's region of this kind and name; without a name, all regions of the kind.

        A missing region is no error.
        """
        for named in [*self._regions] if name is None else [_RegionName(owner, name)]:
            region = self._regions.get(named)
            if named.owner == owner and region is not None and region.kind == kind:
                del self._regions[named]

    def unregister_all(self) -> None:
        """Remove the regions of all clients."""
        self._regions.clear()

    def find_range(self, owner: str | None, name: str, offset: int, nbytes: int) -> RegionRange:
        """Return a range of a region, which stays open while the caller refers to the range.

        Raises:
            UnusableRegionError: there is no such region, or it or its file does not have this range.
        """
        region = self._regions.get(_RegionName(owner, name))
        if region is None:
            raise self._make_unknown_error(name)
        # Python integers do not overflow.
        if offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
            raise UnusableRegionError(
                f"{nbytes} bytes at offset {offset} do not lie within the {region.nbytes} bytes of the region"
                f" {name[:64]!r}"
            )
        region.require_usable_range(offset, nbytes)
        return RegionRange(region, offset, nbytes)

    def describe_regions(self, owner: str | None, kind: Kind, name: str | None = None) -> list[dict[str, Any]]:
        """Describe the owner's regions of a kind in the protocol's form: all, or the one with this name.

        Raises:
            UnusableRegionError: there is no such region.
        """
        if name is None:
            mine = [(named.name, region) for named, region in self._regions.items() if named.owner == owner]
            return [_describe_named(each, region) for each, region in mine if region.kind == kind]
        region = self._regions.get(_RegionName(owner, name))
        if region is None or region.kind != kind:
            raise self._make_unknown_error(name)
        return [_describe_named(name, region)]

    def _make_unknown_error(self, name: str) -> UnusableRegionError:
        """Make the error for a region that is not registered.

        If the server allows no registrations, the message states that instead.
        """
        may_register = self.is_enabled or self._shares_device_memory
        return UnusableRegionError(f"no region with the name {name[:64]!r} is registered" if may_register else OFF)

    def _collect_closed(self) -> None:
        while not self._closed_sizes.empty():
            self._open_bytes -= self._closed_sizes.get()
            self._open_count -= 1


def require_region_name(name: str) -> None:
    """Raises: UnusableRegionError: no region may have this name."""
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise UnusableRegionError(f"a region's name must have 1 to {_LONGEST_NAME} printable characters")


def _describe_named(name: str, region: MemoryRegion) -> dict[str, Any]:
    return {"name": name, **region.describe()}
