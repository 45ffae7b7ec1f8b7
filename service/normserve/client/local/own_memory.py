"""A client's own memory of the device, which the server opens so that nothing in it need be copied.

Each allocation is offered once, when a tensor in it first comes, and withdrawn once no storage that lies in it and
came is left: with the next message, since storages go within any allocation of any thread.
"""

import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from normserve.codec import local_frames as frames
from normserve.memory.allocations import Allocation, allocation_of, identity_of
from normserve.memory.device_segments import Device, DeviceMemoryError

log = logging.getLogger(__name__)

# What the server opens for one connection; tensors beyond are copied.
_MOST_OFFERED, _MOST_REFUSED = 64, 1024

_FORBIDDEN, _OVERLOADED = 403, 429


@dataclass(slots=True)
class _Offered:
    """An allocation that the server has open.

    Attributes:
        number: of the segment that it is there.
        storages: torch's that lie in it, by their addresses.
    """

    number: int
    address: int
    storages: dict[int, "weakref.ref[Any]"] = field(default_factory=dict)


class Offer:
    """An allocation that the server does not know yet: send its message, then call `take_answer`."""

    def __init__(self, home: "OwnMemory", identity: int, allocation: Allocation, storage: Any) -> None:
        self.message = frames.Own(allocation.handle.hex(), allocation.nbytes)
        self._told = home, identity, allocation, storage

    def take_answer(self, answer: frames.Answer) -> None:
        """Note whether the server has opened it."""
        home, identity, allocation, storage = self._told
        home.take_answer(answer, identity, allocation, storage)


class OwnMemory:
    """Of one connection.  Threads share one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._offered: dict[int, _Offered] = {}
        self._refused: set[int] = set()
        self._gone: deque[tuple[int, int, weakref.ref[Any]]] = deque()
        self._withdrawn: list[int] = []
        self._lock = threading.Lock()
        self._is_wanted = True
        self._has_warned = False

    @property
    def is_idle(self) -> bool:
        """Whether storages have gone, and perhaps allocations are to be withdrawn."""
        return bool(self._gone or self._withdrawn)

    def find(self, tensor: Any) -> tuple[int, int] | Offer | None:
        """Where a contiguous tensor lies: the segment and the offset, or what must be offered first.

        None where the tensor must be copied.
        """
        if not self._is_wanted or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        try:
            identity = identity_of(self._device, address)
        except DeviceMemoryError:
            return None
        with self._lock:
            known = self._offered.get(identity)
            if known is not None:
                self._hold(identity, known, tensor.untyped_storage())
                return known.number, address - known.address
            if identity in self._refused or len(self._offered) >= _MOST_OFFERED:
                return None
        try:
            allocation = allocation_of(self._device, address)
        except DeviceMemoryError as error:
            self._refuse(identity, str(error))
            return None
        if address + tensor.nbytes > allocation.address + allocation.nbytes:
            return None
        return Offer(self, identity, allocation, tensor.untyped_storage())

    def take_answer(self, answer: frames.Answer, identity: int, allocation: Allocation, storage: Any) -> None:
        """What the server says of an offer."""
        if answer.status >= 400 or answer.opened is None:
            if answer.status == _FORBIDDEN:
                self._is_wanted = False
            if answer.status != _OVERLOADED:
                self._refuse(identity, str(answer.problem.get("detail", answer.status)))
            return
        with self._lock:
            known = self._offered.get(identity)
            if known is not None:
                # Another thread offered it meanwhile.
                self._withdrawn.append(answer.opened)
            else:
                known = self._offered[identity] = _Offered(answer.opened, allocation.address)
            self._hold(identity, known, storage)

    def withdrawn(self) -> list[int]:
        """The numbers of segments that are to be freed: nothing of this client's that came lies there any more."""
        with self._lock:
            numbers, self._withdrawn = self._withdrawn, []
            for _ in range(len(self._gone)):
                identity, key, reference = self._gone.popleft()
                known = self._offered.get(identity)
                if known is None or known.storages.get(key) is not reference:
                    continue
                del known.storages[key]
                if not known.storages:
                    del self._offered[identity]
                    numbers.append(known.number)
        return numbers

    def withdraw_all(self) -> list[int]:
        """The numbers of all segments, none of which is used from here on."""
        numbers = self.withdrawn()
        with self._lock:
            self._is_wanted = False
            numbers += [known.number for known in self._offered.values()]
            self._offered.clear()
        return numbers

    def _hold(self, identity: int, known: _Offered, storage: Any) -> None:
        key: int = storage._cdata
        reference = known.storages.get(key)
        if reference is None or reference() is not storage:
            gone = self._gone
            known.storages[key] = weakref.ref(storage, lambda died: gone.append((identity, key, died)))

    def _refuse(self, identity: int, why: str) -> None:
        """Copy from here on: whatever is wrong with an allocation stays so."""
        with self._lock:
            if len(self._refused) >= _MOST_REFUSED:
                self._refused.clear()
            self._refused.add(identity)
        if not self._has_warned:
            self._has_warned = True
            log.warning("tensors on the device are copied into the shared memory: %s", why)
