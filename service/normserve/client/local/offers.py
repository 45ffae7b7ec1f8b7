"""The device memory that a server offers to one connection, and the client's arena in it."""

from collections.abc import Callable, Sequence
from typing import Any

from normserve.client.local.arena import HostArena
from normserve.client.local.device_arena import DeviceArena, make_device_arena

_UNKNOWN = object()

# The pending clean-up of closed connections whose arenas are still in use.
_LEAVING: dict["DeviceMemoryOffer", Callable[[], None]] = {}


class DeviceMemoryOffer:
    """The server's offer of device memory to one connection."""

    def __init__(self) -> None:
        self._offer: object = _UNKNOWN
        self._arena: DeviceArena | None = None
        self._is_arena_made = False

    @property
    def is_known(self) -> bool:
        """Whether the server has stated its offer, which it cannot do while it starts."""
        return self._offer is not _UNKNOWN

    def read_hello_document(self, greeting: Any) -> None:
        """Read the offer in the server's greeting."""
        if isinstance(greeting, dict):
            self._offer = greeting.get("device", _UNKNOWN)

    def get_arena(self, index: int) -> DeviceArena | None:
        """Return the arena in a device's memory; None where the server offers no memory of that device.

        Args: index: torch's index of the device.
        """
        if not self._is_arena_made and self.is_known:
            self._is_arena_made = True
            self._arena = make_device_arena(self._offer)
        arena = self._arena
        return arena if arena is not None and index == arena.ordinal else None

    def add_device_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Do as `DeviceArena.add_device_segment`."""
        if self._arena is None:
            raise ValueError("the server sent device memory that was not requested")
        self._arena.add_device_segment(number, descriptor, nbytes)

    def call_when_empty(self, host: HostArena, then: Callable[[], None]) -> None:
        """Call `then` once no block of any arena is in use; nothing may be allocated from here on.

        Until then the connection is kept: the memory stays mapped for a captured graph, and a block in a reference
        cycle is collected without the connection's open socket.
        """
        device = self._arena

        def finish() -> None:
            # Not by its own name, which would be a cycle: the memory is unmapped now, and not by the collector.
            _LEAVING.pop(self, None)
            then()

        _LEAVING[self] = finish
        host.call_when_empty(finish if device is None else lambda: device.call_when_empty(finish))

    def unmap_segments(self) -> Sequence[int]:
        """Unmap all segments of the device's memory and return their numbers."""
        if self._arena is None:
            return ()
        numbers = self._arena.segment_numbers
        self._arena.unmap_segments()
        return numbers
