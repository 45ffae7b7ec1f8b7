"""Accounting of device memory by user.

A client may still use device memory that it has returned, because its mapping stays valid.  Therefore a segment is
charged until the client's process has ended, and until then it is given to no other client.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any

from normserve.errors import InvalidParameterError
from normserve.local.client_segments import OrphanedSegments, SegmentAccounts
from normserve.local.peer import PeerProcess
from normserve.memory.device_segments import (
    DeviceMemoryError,
    DeviceMemoryFullError,
    DeviceSegment,
    ShareableDevice,
)
from normserve.memory.thread_allocation import make_on_thread

log = logging.getLogger(__name__)


class ChargedDeviceSegment(DeviceSegment):
    """A segment of device memory that a user is charged for until its mapping here has ended.

    Attributes:
        uid: the charged user.
        is_returned: whether the client's process has ended.
        released_charges: receives the user and the bytes when the segment is unmapped.
    """

    uid = 0
    is_returned = False
    released_charges: "queue.SimpleQueue[tuple[int, int]] | None" = None

    def __del__(self) -> None:
        super().__del__()
        if self.released_charges is not None:
            self.released_charges.put((self.uid, len(self)))


class DeviceSegmentAllocator:
    """An allocator of device memory segments for clients; belongs to the event loop's thread."""

    def __init__(self, most_bytes: int, find: Callable[[], ShareableDevice | None]) -> None:
        """Args:
        most_bytes: the most bytes of one user; 0 disables device memory.
        find: returns the device, once the server is ready; None where its memory cannot be shared.
        """
        self._max_user_bytes = most_bytes
        self._find_device = find
        self._accounts = SegmentAccounts(most_bytes, "device memory", "local_device_bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of all segments that clients use, or that are kept for their processes."""
        return self._accounts.nbytes

    @property
    def device(self) -> ShareableDevice | None:
        """The device whose memory is shared; None where there is none."""
        return self._find_device() if self._max_user_bytes else None

    def describe_device(self) -> dict[str, Any] | None:
        """Describe the device and the limit of its memory for a client; None where no memory is shared."""
        device = self.device
        return None if device is None else {"uuid": device.uuid, "bytes": self._max_user_bytes}

    async def allocate_segment(
        self, peer: PeerProcess, nbytes: int, spent: list[ChargedDeviceSegment], leftovers: OrphanedSegments
    ) -> tuple[int, ChargedDeviceSegment]:
        """Allocate at least `nbytes` of zeros; return a descriptor, which the caller must close, and the segment.

        Args:
            spent: segments that the client has freed on this connection; a suitable one is removed and reused.
            leftovers: segments of ended connections of the client's process, which are reused as well.

        Raises:
            InvalidParameterError: the server does not share device memory.
            TooLargeError: no user may have so many bytes.
            OverloadedError: this user has too many bytes now, or the device has no more memory.
        """
        device = self.device
        if device is None:
            raise InvalidParameterError("memory must be host: this server does not share device memory")
        nbytes = device.round_up(nbytes)
        reusable = _pop_reusable(peer, nbytes, spent, leftovers)
        if reusable is None:
            self._accounts.charge_segment(peer.uid, nbytes)
        try:
            # Clearing and the driver's calls take a millisecond, for which the event loop must not wait.
            descriptor, segment = await make_on_thread(_export_segment, device, reusable, nbytes)
        except BaseException as error:
            if reusable is None:
                self._accounts.released_charges.put((peer.uid, nbytes))
            else:
                spent.append(reusable)
            if not isinstance(error, DeviceMemoryError):
                raise
            if not isinstance(error, DeviceMemoryFullError):
                # The text alone: an error's frames hold the segment.
                log.error("device memory cannot be shared: %s", str(error))
            raise self._accounts.make_exhausted_error(nbytes) from None
        segment.uid, segment.released_charges = peer.uid, self._accounts.released_charges
        return descriptor, segment


def _pop_reusable(
    peer: PeerProcess, nbytes: int, spent: list[ChargedDeviceSegment], leftovers: OrphanedSegments
) -> ChargedDeviceSegment | None:
    """Remove and return the smallest sufficient segment that the client's process has had, or None."""
    found: tuple[list[Any], ChargedDeviceSegment] | None = None
    candidates: Sequence[list[Any]] = (spent, leftovers.find_segments(peer.pid) if peer.pid else [])
    for segments in candidates:
        for segment in segments:
            if not isinstance(segment, ChargedDeviceSegment) or segment.uid != peer.uid or len(segment) < nbytes:
                continue
            if found is None or len(segment) < len(found[1]):
                found = segments, segment
    if found is None:
        return None
    found[0].remove(found[1])
    return found[1]


def _export_segment(
    device: ShareableDevice, segment: ChargedDeviceSegment | None, nbytes: int
) -> tuple[int, ChargedDeviceSegment]:
    if segment is None:
        segment = device.allocate(nbytes, ChargedDeviceSegment)
    else:
        device.zero_segment(segment)
    return device.export_descriptor(segment), segment
