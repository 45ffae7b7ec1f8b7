"""Permits: how many requests, and how many bytes of bodies, may be inside the server at once."""

from normserve.errors import OverloadedError


class Limits:
    """A budget of requests and bytes, taken by try-acquire: nobody ever waits for a permit.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0

    def acquire(self, nbytes: int) -> "Permit":
        """Admit one request that brings `nbytes`.

        Raises:
            OverloadedError: the budget of requests or of bytes is spent.
        """
        if self.requests >= self._max_requests:
            raise OverloadedError(f"{self.requests} requests are in flight, no more than that are admitted")
        permit = Permit(self)
        self.reserve(nbytes)
        permit.nbytes = nbytes
        self.requests += 1
        return permit

    def reserve(self, nbytes: int) -> None:
        """Take bytes out of the budget.

        Raises:
            OverloadedError: they are not there.
        """
        if self.bytes + nbytes > self._max_bytes:
            raise OverloadedError(
                f"{nbytes} more bytes do not fit beside {self.bytes} in flight of {self._max_bytes} admitted"
            )
        self.bytes += nbytes

    def give_back(self, permit: "Permit") -> None:
        """Called once by each permit."""
        self.requests -= 1
        self.bytes -= permit.nbytes


class Permit:
    """The right of one request to be inside; release it when the last byte is out or the client is gone."""

    def __init__(self, limits: Limits) -> None:
        self._limits: Limits | None = limits
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Ask for more bytes, for a body whose length was not announced.

        Raises:
            OverloadedError: the budget is spent; what the permit already holds stays held.
        """
        if self._limits is not None:
            self._limits.reserve(nbytes)
            self.nbytes += nbytes

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.give_back(self)
