"""The transports of calls: each sends a call and returns its response.

A transport takes an `ApiCall`, whose tensors are described memory, and returns an `ApiResponse`, whose body is a
buffer of its own.  It makes one attempt; the client decides whether there is another, and after which
pause.  It raises no errors but `ClientError`, and none of its waits goes beyond the deadline.
"""

from typing import Any, Protocol

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.responses.api_response import ApiResponse


class CallTransport(Protocol):
    """The interface of the blocking client's transports; threads share a transport."""

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call and return its response, with any status.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """

    def close(self) -> None:
        """Release the transport's connections and memory."""


class AsyncCallTransport(Protocol):
    """The interface of the asynchronous client's transports; tasks share a transport."""

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call and return its response, with any status.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the response is longer than expected, compressed, or a redirection.
        """

    async def close(self) -> None:
        """Release the transport's connections and memory."""
