"""Polling for the next message of a process that sends one right after each response."""

import asyncio
import os
import time

from normserve.engine.progress import CompletionTracker

SOON_S = 200e-6
"""The longest time in seconds from a sent message to the next one that still counts as prompt.  The other process
must be woken and do its part.
"""

# On one core the other process would wait until the polling ends.
_LEAST_CORES = 2


class BusyPoller:
    """A poller that keeps the event loop awake for a moment while the next message is expected very soon.

    To wake a thread that sleeps takes as long as a small request, above all on virtual machines.  The
    loop polls its sockets in each iteration as always; nothing that is ready waits for this.
    """

    def __init__(self, progress: CompletionTracker | None = None) -> None:
        """Args: progress: of all requests; the poller stops while any is open, as other threads then need Python's
        lock.  None if there are no such threads.
        """
        self._request_progress = progress
        self._sent_at = self._poll_until = 0.0
        self._is_prompt = self._is_polling = False

    def record_received(self) -> None:
        """Record a received message; if it was prompt, the next one may be prompt too."""
        self._is_prompt = time.perf_counter() - self._sent_at <= SOON_S

    def record_sent(self) -> None:
        """Record that a message was sent.  If the last received message came promptly, keep the event loop awake
        for the next one.
        """
        self._sent_at = time.perf_counter()
        if not self._is_prompt:
            return
        self._poll_until = self._sent_at + SOON_S
        if not self._is_polling:
            self._is_polling = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        """Schedule this method for the next iteration of the event loop, which therefore does not sleep.

        The polling ends when its time is over, or while requests are open: other threads then need
        Python's lock.
        """
        may_poll = self._request_progress is None or self._request_progress.is_idle
        if may_poll and time.perf_counter() < self._poll_until:
            asyncio.get_running_loop().call_soon(self._poll)
        else:
            self._is_polling = False


def make_busy_poller(progress: CompletionTracker | None = None) -> BusyPoller | None:
    """Make a poller for this process; return None if the process may use only one core.  Polling would keep
    that core from the sender of the next message.

    Args: progress: as of `BusyPoller`.
    """
    return BusyPoller(progress) if len(os.sched_getaffinity(0)) >= _LEAST_CORES else None
