"""What carries calls: a transport sends one and gives its answer.

A transport takes an `ApiCall`, whose tensors are described memory, and returns an `ApiResponse`, whose body is
memory of the answer's own.  It makes one attempt; the client decides whether there is another, and after what
pause.  It raises no errors but `ClientError`, and none of its waits goes beyond the deadline.
"""

from typing import Any, Protocol

from normserve.client.answers.answer import ApiResponse
from normserve.client.calls.call import ApiCall
from normserve.client.deadlines import Deadline


class CallTransport(Protocol):
    """Of the blocking client; threads share one."""

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call and return its answer, whatever its status.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
            RequestTimeoutError: there was no whole answer in time.
            UnexpectedAnswerError: what came is more than was asked for, or points elsewhere.
        """

    def close(self) -> None:
        """Give back everything that it holds."""


class AsyncCallTransport(Protocol):
    """Of the asynchronous client; tasks share one."""

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """As `CallTransport.exchange`."""

    async def close(self) -> None:
        """Give back everything that it holds."""
