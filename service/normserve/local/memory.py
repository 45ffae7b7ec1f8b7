"""Accounting of shared memory by user."""

import asyncio
import os
import queue
from collections.abc import Callable
from typing import Protocol

from normserve.errors import OverloadedError, TooLargeError
from normserve.memory.segments import HostSegment, make_segment, round_up_to_pages
from normserve.memory.threads import make_on_thread

#: A segment has at least so many bytes: each takes a descriptor.
LEAST_BYTES = 2**20

_MOST_SEGMENTS = 256
_RETRY_AFTER_S = 5.0


class ChargedSegment(HostSegment):
    """Shared memory that a user is charged for until its mapping here has ended.

    A process that has mapped it can read it for as long as it lives, so its content is removed only once
    the client has given it back, or has ended.

    Attributes:
        uid: whose it is.
        is_given_back: no view of it is left.
        registration: what keeps the device's driver aware of it; it goes before the memory does.
        home: is told the user and the bytes once it has gone.
    """

    uid = 0
    is_given_back = False
    registration: object = None
    home: "queue.SimpleQueue[tuple[int, int]] | None" = None

    def __del__(self) -> None:
        if self.home is not None:
            self.registration = None
            if self.is_given_back:
                self.discard()
            # Reentrant, unlike a lock: this may run within any allocation of any thread.
            self.home.put((self.uid, len(self)))


class ClientSegment(Protocol):
    """A segment of any kind of memory that a user is charged for.

    Attributes:
        is_given_back: no view of it is left.
    """

    is_given_back: bool


class _UserAccount:
    """What one user has."""

    def __init__(self) -> None:
        self.bytes = 0
        self.segments = 0


class SegmentAccounts:
    """What users are charged for; belongs to the event loop's thread.

    Attributes:
        most_bytes: that one user may have.
        returned: told the user and the bytes of each segment that is gone, by any thread; unlike a lock it is
            reentrant, for what runs within any allocation.
    """

    def __init__(self, most_bytes: int, kind: str, setting: str) -> None:
        """Args:
        kind: of memory, as errors have it.
        setting: what says `most_bytes`.
        """
        self.most_bytes = most_bytes
        self.returned: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._kind, self._setting = kind, setting
        self._of_users: dict[int, _UserAccount] = {}

    @property
    def nbytes(self) -> int:
        """Of all users."""
        self._collect()
        return sum([account.bytes for account in self._of_users.values()])

    def charge(self, uid: int, nbytes: int) -> None:
        """A user takes a segment of so many bytes.

        Raises:
            TooLargeError: no user may have so many.
            OverloadedError: this one may not now.
        """
        self._collect()
        if nbytes > self.most_bytes:
            raise TooLargeError(f"{nbytes} bytes of {self._kind} are more than {self._setting}, {self.most_bytes}")
        account = self._of_users.setdefault(uid, _UserAccount())
        if account.bytes + nbytes > self.most_bytes or account.segments >= _MOST_SEGMENTS:
            raise OverloadedError(
                f"{nbytes} more bytes of {self._kind} do not fit beside {account.bytes} in {account.segments} "
                f"segments of this user's {self._setting}, {self.most_bytes}",
                _RETRY_AFTER_S,
            )
        account.bytes += nbytes
        account.segments += 1

    def exhausted(self, nbytes: int) -> OverloadedError:
        """The error that there is no memory, whatever the user may have."""
        return OverloadedError(f"there is no {self._kind} of {nbytes} bytes now", _RETRY_AFTER_S)

    def _collect(self) -> None:
        while not self.returned.empty():
            uid, nbytes = self.returned.get()
            account = self._of_users[uid]
            account.bytes -= nbytes
            account.segments -= 1
            if not account.segments:
                del self._of_users[uid]


class HostSegmentAllocator:
    """Lends segments; belongs to the event loop's thread."""

    def __init__(self, most_bytes: int, share: Callable[[memoryview], object] = lambda memory: None) -> None:
        """Args:
        most_bytes: that one user may have.
        share: prepares memory for the device, for as long as what it returns lives.
        """
        self._share = share
        self._accounts = SegmentAccounts(most_bytes, "shared memory", "local_bytes")

    @property
    def nbytes(self) -> int:
        """Of all segments that are lent."""
        return self._accounts.nbytes

    async def lend(self, uid: int, nbytes: int) -> tuple[int, ChargedSegment]:
        """A new segment of at least so many bytes: the descriptor, which is the caller's to close, and its mapping.

        Raises:
            TooLargeError: no user may have so many.
            OverloadedError: this one may not now, or there is no memory.
        """
        nbytes = round_up_to_pages(max(nbytes, LEAST_BYTES))
        self._accounts.charge(uid, nbytes)
        try:
            # Zeroing pages takes a millisecond for 2 MiB, which others shall not wait.
            descriptor, segment = await make_on_thread(self._make, nbytes)
        except BaseException as error:
            self._accounts.returned.put((uid, nbytes))
            if isinstance(error, MemoryError):
                raise self._accounts.exhausted(nbytes) from None
            raise
        segment.uid, segment.home = uid, self._accounts.returned
        return descriptor, segment

    def _make(self, nbytes: int) -> tuple[int, ChargedSegment]:
        descriptor, segment = make_segment(nbytes, ChargedSegment)
        try:
            with memoryview(segment) as memory:
                segment.registration = self._share(memory)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, segment


class OrphanedSegments:
    """Segments that clients do not use any more, or may look at still.

    Those that a connection leaves behind are kept for as long as the client's process lives.
    """

    def __init__(self) -> None:
        self._of_process: dict[int, tuple[int, list[ClientSegment]]] = {}
        self._returning: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return sum([len(segments) for _, segments in self._of_process.values()])

    def of(self, pid: int) -> list[ClientSegment]:
        """Those that are kept for a process; who has another use for one takes it out."""
        return self._of_process[pid][1] if pid in self._of_process else []

    def keep(self, pid: int, watch: int | None, segments: list[ClientSegment]) -> None:
        """Keep these until their process ends.

        Args: watch: a descriptor that can be read once it has, which is closed here; None where there is none.
        """
        if watch is None or not segments:
            if watch is not None:
                os.close(watch)
            self.give_back(segments)
            return
        # Those in a namespace that this process does not see have no number here.
        key = pid or -watch
        if key in self._of_process:
            os.close(watch)
            self._of_process[key][1].extend(segments)
            return
        self._of_process[key] = (watch, segments)
        asyncio.get_running_loop().add_reader(watch, self._end, key)

    def close(self) -> None:
        """Watch no more, and leave everything as it is: the server ends, its clients may go on."""
        for watch, _ in self._of_process.values():
            asyncio.get_running_loop().remove_reader(watch)
            os.close(watch)
        self._of_process.clear()

    def _end(self, key: int) -> None:
        watch, segments = self._of_process.pop(key)
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
        self.give_back(segments)

    def give_back(self, segments: list[ClientSegment]) -> None:
        """Free segments of which the client has no view, each with the last request that uses it."""
        for segment in segments:
            segment.is_given_back = True
        # To take pages away and to unmap them takes a millisecond for 16 MiB, or for a piece of a device's memory.
        returning = asyncio.get_running_loop().run_in_executor(None, segments.clear)
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)

    async def settle(self) -> None:
        """Wait until what was given back before is freed, if no request uses it, and charged to nobody."""
        if self._returning:
            await asyncio.wait(self._returning)
