"""The memory that messages may take in the gateway, reserved before a message is received."""

import asyncio
import collections

from normserve.grpc.statuses import CallError, Code

# A message of usual size is received within milliseconds, and its sender needs no room for the longest any more.
_WAIT_S = 2.0
_RETRY_AFTER_S = 1.0


class MessageBudget:
    """A budget of bytes for messages, from which each reserves room for the longest until its length is known.

    gRPC receives a message as a whole, without stating its length before.  Calls wait for room in the order in
    which they came.  The calls of one address have at most three quarters of the room, and half of the places of
    those that wait: a client that opens calls and sends nothing does not keep others out.

    Attributes:
        max_message_bytes: the length of the longest message.
        max_waiting: how many calls may wait; more are refused at once.
        free_bytes: what is not reserved.
    """

    def __init__(self, max_bytes: int, max_message_bytes: int, max_waiting: int) -> None:
        self.max_message_bytes, self.max_waiting = max_message_bytes, max_waiting
        self.free_bytes = max(max_bytes, max_message_bytes)
        self._max_bytes_per_address = max(self.free_bytes * 3 // 4, max_message_bytes)
        self._bytes_by_address: collections.Counter[str] = collections.Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def reserve(self, address: str) -> "MessageReservation":
        """Reserve room for the longest message of a caller, which takes a moment if there is none.

        Raises:
            CallError: there is none for too long.
        """
        if self._has_room(address):
            self.change_reserved_bytes(address, self.max_message_bytes)
        else:
            await self._wait_for_room(address)
        return MessageReservation(self, address, self.max_message_bytes)

    def change_reserved_bytes(self, address: str, nbytes: int) -> None:
        """Reserve more bytes for an address, or return some if negative, and let the next calls have theirs."""
        self.free_bytes -= nbytes
        self._bytes_by_address[address] += nbytes
        if not self._bytes_by_address[address]:
            del self._bytes_by_address[address]
        if nbytes < 0:
            for turn, waiting_address in list(self._waiting.items()):
                if self._has_room(waiting_address):
                    del self._waiting[turn]
                    self.change_reserved_bytes(waiting_address, self.max_message_bytes)
                    turn.set_result(None)

    def _has_room(self, address: str) -> bool:
        reserved = self._bytes_by_address[address] + self.max_message_bytes
        return self.free_bytes >= self.max_message_bytes and reserved <= self._max_bytes_per_address

    async def _wait_for_room(self, address: str) -> None:
        """Wait until a reservation was made for this call."""
        of_address = sum(each == address for each in self._waiting.values())
        if len(self._waiting) >= self.max_waiting or of_address >= max(1, self.max_waiting // 2):
            raise _make_refusal()
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = address
        try:
            await asyncio.wait_for(asyncio.shield(turn), _WAIT_S)
        except BaseException as error:
            if turn.done():
                self.change_reserved_bytes(address, -self.max_message_bytes)
            else:
                del self._waiting[turn]
            if isinstance(error, TimeoutError):
                raise _make_refusal() from None
            raise


class MessageReservation:
    """The bytes that one call has reserved, at first for the longest message.  Use it as a context manager.

    Attributes:
        least_bytes: what the call keeps reserved until its end, such as a stream for its next message.
    """

    __slots__ = ("_address", "_budget", "_nbytes", "least_bytes")

    def __init__(self, budget: MessageBudget, address: str, nbytes: int) -> None:
        self._budget, self._address, self._nbytes, self.least_bytes = budget, address, nbytes, 0

    def resize(self, nbytes: int) -> None:
        """Change the reservation to what the call has in memory."""
        nbytes = max(nbytes, self.least_bytes)
        change, self._nbytes = nbytes - self._nbytes, nbytes
        self._budget.change_reserved_bytes(self._address, change)

    def __enter__(self) -> "MessageReservation":
        return self

    def __exit__(self, *error: object) -> None:
        self.least_bytes = 0
        self.resize(0)


def _make_refusal() -> CallError:
    return CallError(
        Code.RESOURCE_EXHAUSTED, "the gateway receives as many messages as it has memory for", _RETRY_AFTER_S
    )
