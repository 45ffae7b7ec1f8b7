"""What carries calls: a transport sends one and gives its answer.

A transport takes a `Call`, whose tensors are described memory, and returns an `Answer`, whose body is memory of the
answer's own.  It makes one attempt; whether there is another, and after what pause, is the client's to say.  It
raises no errors but `ClientError`, and none of its waits goes beyond the deadline.
"""

from typing import Any, Protocol

from normserve.client.answers.answer import Answer
from normserve.client.calls.call import Call
from normserve.client.deadlines import Deadline


class Transport(Protocol):
    """Of the blocking client; threads share one."""

    def exchange(self, call: Call[Any], deadline: Deadline) -> Answer:
        """Send a call and return its answer, whatever its status.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
            RequestTimeoutError: there was no whole answer in time.
            UnexpectedAnswerError: what came is more than was asked for, or points elsewhere.
        """

    def close(self) -> None:
        """Give back everything that it holds."""


class AsyncTransport(Protocol):
    """Of the asynchronous client; tasks share one."""

    async def exchange(self, call: Call[Any], deadline: Deadline) -> Answer:
        """As `Transport.exchange`."""

    async def close(self) -> None:
        """Give back everything that it holds."""
