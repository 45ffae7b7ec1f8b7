"""Device memory that clients have allocated themselves and that the server opens for their requests."""

import os
from collections.abc import Callable

from normserve.errors import ForbiddenError, InvalidParameterError, OverloadedError
from normserve.local.peer import Peer
from normserve.memory.allocations import OpenedAllocation, open_for_client
from normserve.memory.device_segments import Device

#: Allocations that one connection may have open; each holds a mapping of all of it.
MOST_OPEN = 64

_RETRY_AFTER_S = 1.0


class LentAllocation(OpenedAllocation):
    """What a client has allocated and lets the server use; it counts towards no quota.

    Attributes:
        is_given_back: the client wants it used no more.
    """

    is_given_back = False


class OwnMemory:
    """Opens what clients allocate, if it may; belongs to the event loop's thread."""

    def __init__(self, is_allowed: bool, find: Callable[[], Device | None]) -> None:
        """Args:
        is_allowed: the operator wants it.
        find: the device, once the server is ready; None where its memory is not shared.
        """
        self._is_allowed = is_allowed
        self._find = find

    def may(self, peer: Peer) -> bool:
        """Whether a client may have its memory opened: the server's own user alone.

        A process that knows a handle can open it, and one that frees too early harms the server: both need trust.
        """
        return self._is_allowed and peer.uid == os.geteuid()

    async def open(self, peer: Peer, handle: str, nbytes: int, held: int) -> LentAllocation:
        """Open an allocation.

        Args:
            handle: in hexadecimal.
            nbytes: that the client says it has.
            held: how many the connection has open, or is about to.

        Raises:
            ForbiddenError: this client's may not be.
            InvalidParameterError: there is no device, or none that could open this; or the extent is false.
            OverloadedError: the connection has too many.
        """
        if not self._is_allowed:
            raise ForbiddenError("clients' own memory is not opened: --local-own-memory is off")
        if not self.may(peer):
            raise ForbiddenError("only memory of the server's own user is opened")
        device = self._find()
        if device is None:
            raise InvalidParameterError("there is no device whose memory could be opened")
        if held >= MOST_OPEN:
            raise OverloadedError(f"a connection may have {MOST_OPEN} allocations open", _RETRY_AFTER_S)
        try:
            return await open_for_client(device, bytes.fromhex(handle), nbytes, LentAllocation)
        except ValueError as error:
            raise InvalidParameterError(str(error)) from None
