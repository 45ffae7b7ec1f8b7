"""Segments of host and device memory for clients that share memory, accounted for by user.

A client may still use device memory that it has returned, because its mapping stays valid.  Therefore a segment of
device memory is charged until the client's process has ended, and until then it is given to no other client.
"""

import asyncio
import logging
import os
import queue
from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol

from normserve.errors import InvalidParameterError, OverloadedError, QuotaExhaustedError, TooLargeError
from normserve.local.local_session import PeerProcess
from normserve.memory.device_segments import (
    DeviceMemoryError,
    DeviceMemoryFullError,
    DeviceSegment,
    ShareableDevice,
)
from normserve.memory.host_segments import HostSegment, make_segment, round_up_to_pages
from normserve.memory.thread_allocation import make_unretained_on_thread

log = logging.getLogger(__name__)

#: A segment has at least so many bytes: each takes a descriptor.
LEAST_BYTES = 2**20

_MOST_SEGMENTS = 256
_RETRY_AFTER_S = 5.0


class ClientSegment(Protocol):
    """The common interface of host and device segments that are charged to a user.

    Attributes:
        is_returned: whether the client no longer uses it, because it has freed the segment or has ended.
    """

    is_returned: bool


class ChargedSegment(HostSegment):
    """A shared memory segment in host memory whose bytes count towards one user's limit.  The charge ends
    when the server unmaps it.

    A process that has mapped the segment can read it until the process ends, so the content is removed only once
    the client has freed the segment, or has ended.

    Attributes:
        uid: the charged user.
        is_returned: whether the client has freed it or has ended; then the content is removed at the unmapping.
        device_registration: the registration with the device's driver, which is dropped before the memory.
        released_charges: receives the user and the bytes when the segment is unmapped.
    """

    uid = 0
    is_returned = False
    device_registration: object = None
    released_charges: "queue.SimpleQueue[tuple[int, int]] | None" = None

    def __del__(self) -> None:
        if self.released_charges is not None:
            self.device_registration = None
            if self.is_returned:
                self.discard_content()
            # Reentrant, unlike a lock: this may run within any allocation of any thread.
            self.released_charges.put((self.uid, len(self)))


class ChargedDeviceSegment(DeviceSegment):
    """A segment of device memory whose bytes count towards one user's limit.  The charge ends when the
    server unmaps it.

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


class _UserAccount:
    """The number of bytes and of segments that one user is charged for at present."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.segment_count = 0


class _SegmentAccounts:
    """The bytes and segments charged to each user for one kind of memory, host or device.  Only the event
    loop's thread may use it.

    Attributes:
        max_user_bytes: the most bytes of one user.
        released_charges: the user and the bytes of each unmapped segment, added by any thread; unlike a
            lock it is reentrant, for destructors that run within any allocation.
    """

    def __init__(self, most_bytes: int, kind: str, setting: str) -> None:
        """Args:
        kind: the kind of memory, for the text of errors.
        setting: the name of the setting for `max_user_bytes`.
        """
        self.max_user_bytes = most_bytes
        self.released_charges: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._memory_name, self._setting_name = kind, setting
        self._by_uid: dict[int, _UserAccount] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that all users are charged for."""
        self._collect_released()
        return sum([account.nbytes for account in self._by_uid.values()])

    def charge_segment(self, uid: int, nbytes: int, own_segments: Sequence[Sized]) -> None:
        """Charge a user for one more segment of `nbytes`, or refuse it.

        Args: own_segments: the segments of this kind that the user has and only the requesting client can free.

        Raises:
            TooLargeError: `nbytes` alone exceeds the limit of bytes that applies to every user.
            QuotaExhaustedError: beside the client's own segments they exceed the limit.
            OverloadedError: this user's bytes or segments would exceed the limit at present.
        """
        self._collect_released()
        if nbytes > self.max_user_bytes:
            raise TooLargeError(
                f"{nbytes} bytes of {self._memory_name} are more than {self._setting_name}, {self.max_user_bytes}"
            )
        own_bytes = sum(map(len, own_segments))
        if own_bytes + nbytes > self.max_user_bytes or len(own_segments) >= _MOST_SEGMENTS:
            raise QuotaExhaustedError(
                f"{nbytes} more bytes of {self._memory_name} do not fit into this user's {self._setting_name}, "
                f"{self.max_user_bytes}: this client itself holds {own_bytes} in {len(own_segments)} segments (of "
                f"{_MOST_SEGMENTS} at most) until it deletes the arrays in them"
            )
        account = self._by_uid.setdefault(uid, _UserAccount())
        if account.nbytes + nbytes > self.max_user_bytes or account.segment_count >= _MOST_SEGMENTS:
            raise OverloadedError(
                f"{nbytes} more bytes of {self._memory_name} do not fit beside {account.nbytes} in "
                f"{account.segment_count} segments of this user's {self._setting_name}, {self.max_user_bytes}",
                _RETRY_AFTER_S,
            )
        account.nbytes += nbytes
        account.segment_count += 1

    def make_exhausted_error(self, nbytes: int) -> OverloadedError:
        """Make the error of exhausted memory, as opposed to a user's exceeded limit."""
        return OverloadedError(f"there is no {self._memory_name} of {nbytes} bytes now", _RETRY_AFTER_S)

    def _collect_released(self) -> None:
        """Subtract the segments that were unmapped since the last call from their users' accounts."""
        while not self.released_charges.empty():
            uid, nbytes = self.released_charges.get()
            account = self._by_uid[uid]
            account.nbytes -= nbytes
            account.segment_count -= 1
            if not account.segment_count:
                del self._by_uid[uid]


class OrphanedSegments:
    """The segments that clients have freed, and those of ended connections, until the server unmaps them.

    The segments of an ended connection are kept until the client's process ends.
    """

    def __init__(self) -> None:
        self._by_process: dict[int, tuple[int, list[ClientSegment]]] = {}
        self._free_tasks: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return sum([len(segments) for _, segments in self._by_process.values()])

    def find_segments(self, pid: int) -> list[ClientSegment]:
        """Return the list of segments kept for a process.  The caller may remove those that it reuses."""
        return self._by_process[pid][1] if pid in self._by_process else []

    def retain_segments(self, pid: int, exit_descriptor: int | None, segments: list[ClientSegment]) -> None:
        """Keep the segments of an ended connection until the client's process ends, because it may still use them.

        Without `exit_descriptor` they are freed at once.

        Args:
            exit_descriptor: a descriptor that is readable once the process has ended, closed here; None if there is
                none.
        """
        if exit_descriptor is None or not segments:
            if exit_descriptor is not None:
                os.close(exit_descriptor)
            self.submit_segments_for_freeing(segments)
            return
        # Processes in a namespace that this process does not see have no number here.
        key = pid or -exit_descriptor
        if key in self._by_process:
            os.close(exit_descriptor)
            self._by_process[key][1].extend(segments)
            return
        self._by_process[key] = (exit_descriptor, segments)
        asyncio.get_running_loop().add_reader(exit_descriptor, self._on_process_exit, key)

    def stop_monitoring(self) -> None:
        """Stop waiting for the clients' processes to end, without clearing any segment.  The server is ending,
        but its clients may continue to use the memory.
        """
        for watch, _ in self._by_process.values():
            asyncio.get_running_loop().remove_reader(watch)
            os.close(watch)
        self._by_process.clear()

    def _on_process_exit(self, key: int) -> None:
        """Free the segments that were kept for a process, now that the process has ended."""
        watch, segments = self._by_process.pop(key)
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
        self.submit_segments_for_freeing(segments)

    def submit_segments_for_freeing(self, segments: list[ClientSegment]) -> None:
        """Drop the server's references to segments that their client no longer uses, on another thread.  Each
        segment is unmapped once no request uses it.
        """
        for segment in segments:
            segment.is_returned = True
        # To take pages away and to unmap them takes a millisecond for 16 MiB, or for a piece of a device's memory.
        returning = asyncio.get_running_loop().run_in_executor(None, segments.clear)
        self._free_tasks.add(returning)
        returning.add_done_callback(self._free_tasks.discard)

    async def wait_freed(self) -> None:
        """Wait until the segments freed so far are unmapped and no longer charged, except those that a request
        still uses.
        """
        if self._free_tasks:
            await asyncio.wait(self._free_tasks)


class HostSegmentAllocator:
    """The server's allocator of host memory segments that it shares with clients.  Each user's bytes are limited.
    Only the event loop's thread may use the allocator.
    """

    def __init__(
        self, most_bytes: int, register_with_device: Callable[[memoryview], object] = lambda memory: None
    ) -> None:
        """Args:
        most_bytes: that one user may have.
        register_with_device: registers memory with the device until the returned object is dropped.
        """
        self._register_with_device = register_with_device
        self._accounts = _SegmentAccounts(most_bytes, "shared memory", "local_bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of all segments that are mapped here."""
        return self._accounts.nbytes

    async def allocate_segment(
        self, uid: int, nbytes: int, own_segments: Sequence[ClientSegment] = ()
    ) -> tuple[int, ChargedSegment]:
        """Charge the user for a new shared memory segment of at least `nbytes`, and make it on another thread.

        Returns:
            The segment's file descriptor, which the caller must close, and the segment.

        Raises:
            TooLargeError: the segment alone exceeds every user's limit.
            OverloadedError: the user's limit is exceeded at present, or there is no memory.
        """
        nbytes = round_up_to_pages(max(nbytes, LEAST_BYTES))
        own_host_segments = [each for each in own_segments if isinstance(each, ChargedSegment) and each.uid == uid]
        self._accounts.charge_segment(uid, nbytes, own_host_segments)
        try:
            # Zeroing pages takes a millisecond for 2 MiB, which others shall not wait.
            descriptor, segment = await make_unretained_on_thread(self._make_segment, nbytes)
        except BaseException as error:
            self._accounts.released_charges.put((uid, nbytes))
            if isinstance(error, MemoryError):
                raise self._accounts.make_exhausted_error(nbytes) from None
            raise
        segment.uid, segment.released_charges = uid, self._accounts.released_charges
        return descriptor, segment

    def _make_segment(self, nbytes: int) -> tuple[int, ChargedSegment]:
        """Make a segment and register it with the device; return its file descriptor and the segment.  Runs on
        another thread, because zeroing the pages takes long.
        """
        descriptor, segment = make_segment(nbytes, ChargedSegment)
        try:
            with memoryview(segment) as memory:
                segment.device_registration = self._register_with_device(memory)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, segment


class DeviceSegmentAllocator:
    """The server's allocator of device memory segments that it shares with clients.  Each user's bytes are limited.
    Only the event loop's thread may use the allocator.
    """

    def __init__(self, most_bytes: int, find: Callable[[], ShareableDevice | None]) -> None:
        """Args:
        most_bytes: the most bytes of one user; 0 disables device memory.
        find: returns the device, once the server is ready; None where its memory cannot be shared.
        """
        self._max_user_bytes = most_bytes
        self._find_device = find
        self._accounts = _SegmentAccounts(most_bytes, "device memory", "local_device_bytes")

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
        self,
        peer: PeerProcess,
        nbytes: int,
        freed_segments: list[ChargedDeviceSegment],
        orphaned_segments: OrphanedSegments,
        own_segments: Sequence[ClientSegment] = (),
    ) -> tuple[int, ChargedDeviceSegment]:
        """Make a zeroed device segment of at least `nbytes`, or reuse one that the client's process had before.

        Args:
            freed_segments: segments that the client has freed on this connection; a suitable one is removed and
                reused.
            orphaned_segments: segments of ended connections of the client's process, which are reused as well.
            own_segments: all segments, of any kind, that only this client can free.

        Returns:
            A descriptor of the segment, which the caller must close, and the segment.

        Raises:
            InvalidParameterError: the server does not share device memory.
            TooLargeError: no user may have so many bytes.
            OverloadedError: this user has too many bytes now, or the device has no more memory.
        """
        device = self.device
        if device is None:
            raise InvalidParameterError("memory must be host: this server does not share device memory")
        nbytes = device.round_up(nbytes)
        reusable = _pop_smallest_reusable(peer, nbytes, freed_segments, orphaned_segments)
        if reusable is None:
            own = [each for each in own_segments if isinstance(each, ChargedDeviceSegment) and each.uid == peer.uid]
            self._accounts.charge_segment(peer.uid, nbytes, own)
        try:
            # Clearing and the driver's calls take a millisecond, for which the event loop must not wait.
            descriptor, segment = await make_unretained_on_thread(
                _allocate_or_zero_segment, device, reusable, nbytes
            )
        except BaseException as error:
            if reusable is None:
                self._accounts.released_charges.put((peer.uid, nbytes))
            else:
                freed_segments.append(reusable)
            if not isinstance(error, DeviceMemoryError):
                raise
            if not isinstance(error, DeviceMemoryFullError):
                # The text alone: an error's frames hold the segment.
                log.error("device memory cannot be shared: %s", str(error))
            raise self._accounts.make_exhausted_error(nbytes) from None
        segment.uid, segment.released_charges = peer.uid, self._accounts.released_charges
        return descriptor, segment


def _pop_smallest_reusable(
    peer: PeerProcess, nbytes: int, freed_segments: list[ChargedDeviceSegment], orphaned_segments: OrphanedSegments
) -> ChargedDeviceSegment | None:
    """Remove and return the smallest of the process's former segments with at least `nbytes`; None if there
    is none.  Only the same process may get such memory again.
    """
    found: tuple[list[Any], ChargedDeviceSegment] | None = None
    candidates: Sequence[list[Any]] = (
        freed_segments,
        orphaned_segments.find_segments(peer.pid) if peer.pid else [],
    )
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


def _allocate_or_zero_segment(
    device: ShareableDevice, reusable_segment: ChargedDeviceSegment | None, nbytes: int
) -> tuple[int, ChargedDeviceSegment]:
    """Allocate a device segment, or zero the given one; return a descriptor for the client, and the segment.
    Runs on another thread.
    """
    if reusable_segment is None:
        reusable_segment = device.allocate_zeroed(nbytes, ChargedDeviceSegment)
    else:
        device.zero_segment(reusable_segment)
    return device.export_descriptor(reusable_segment), reusable_segment
