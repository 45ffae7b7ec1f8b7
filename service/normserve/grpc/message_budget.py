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
    which they came.

    Attributes:
        max_message_bytes: the length of the longest message.
        max_waiting: how many calls may wait; more are refused at once.
        free_bytes: what is not reserved.
    """

    def __init__(self, max_bytes: int, max_message_bytes: int, max_waiting: int) -> None:
        self.max_message_bytes, self.max_waiting = max_message_bytes, max_waiting
        self.free_bytes = max(max_bytes, max_message_bytes)
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def reserve(self) -> "MessageReservation":
        """Reserve room for the longest message, which takes a moment if there is none.

        Raises:
            CallError: there is none for too long.
        """
        if self._waiting or self.free_bytes < self.max_message_bytes:
            await self._wait_for_room()
        else:
            self.free_bytes -= self.max_message_bytes
        return MessageReservation(self, self.max_message_bytes)

    def add_free_bytes(self, nbytes: int) -> None:
        """Return bytes of a reservation, or take more if negative, and let the next calls have theirs."""
        self.free_bytes += nbytes
        while self._waiting and self.free_bytes >= self.max_message_bytes:
            self.free_bytes -= self.max_message_bytes
            self._waiting.popleft().set_result(None)

    async def _wait_for_room(self) -> None:
        """Wait until a reservation was made for this call."""
        if len(self._waiting) >= self.max_waiting:
            raise _make_refusal()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(asyncio.shield(turn), _WAIT_S)
        except BaseException as error:
            if turn.done():
                self.add_free_bytes(self.max_message_bytes)
            else:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise _make_refusal() from None
            raise


class MessageReservation:
    """The bytes that one call has reserved, at first for the longest message.  Use it as a context manager.

    Attributes:
        least_bytes: what the call keeps reserved until its end, such as a stream for its next message.
    """

    __slots__ = ("_budget", "_nbytes", "least_bytes")

    def __init__(self, budget: MessageBudget, nbytes: int) -> None:
        self._budget, self._nbytes, self.least_bytes = budget, nbytes, 0

    def resize(self, nbytes: int) -> None:
        """Change the reservation to what the call has in memory."""
        nbytes = max(nbytes, self.least_bytes)
        change, self._nbytes = self._nbytes - nbytes, nbytes
        self._budget.add_free_bytes(change)

    def __enter__(self) -> "MessageReservation":
        return self

    def __exit__(self, *error: object) -> None:
        self.least_bytes = 0
        self.resize(0)


def _make_refusal() -> CallError:
    return CallError(
        Code.RESOURCE_EXHAUSTED, "the gateway receives as many messages as it has memory for", _RETRY_AFTER_S
    )
