"""Polling for the next request of a client that sends one right after each response."""

import asyncio
import os
import time

from normserve.engine.progress import Progress

# From a response to the client's next request: it must be woken, and makes the request.
_SOON_S = 200e-6

# On fewer, the client may need the core that polls.
_LEAST_CORES = 4


class Polling:
    """Keeps the event loop from sleeping while such a request is due.

    To wake a thread that sleeps takes as long as a small request, above all on virtual machines.  The loop polls
    its sockets in each iteration as always; nothing that is ready waits for this.
    """

    def __init__(self, progress: Progress) -> None:
        """Args: progress: of all requests; while there are any, their own events wake the loop."""
        self._progress = progress
        self._until = 0.0
        self._is_polling = False

    def follow(self, received: float, responded: float) -> None:
        """Poll from now on if a request came soon after the response before it: so may the next one.

        Args: received, responded: when the request came and when the client had its last response before that, by
            `time.perf_counter`.
        """
        if received - responded > _SOON_S:
            return
        self._until = time.perf_counter() + _SOON_S
        if not self._is_polling:
            self._is_polling = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        if self._progress.is_idle and time.perf_counter() < self._until:
            asyncio.get_running_loop().call_soon(self._poll)
        else:
            self._is_polling = False


def polling(progress: Progress) -> Polling | None:
    """For this process; None where it may run on too few cores."""
    return Polling(progress) if len(os.sched_getaffinity(0)) >= _LEAST_CORES else None
