"""Detection of work that does not finish.

Not thread-safe: it belongs to the event loop's thread.
"""

import time
from collections.abc import Callable

from normserve.errors import StalledError

_RETRY_AFTER_S = 5.0


class CompletionTracker:
    """The number of requests or launches in progress, and the time since the last one ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_count = 0
        self._last_change_at = 0.0

    def begin_work(self) -> None:
        """Count a request or a launch that begins."""
        if not self._open_count:
            self._last_change_at = self._clock()
        self._open_count += 1

    def end_work(self) -> None:
        """Count the end of a piece of work, successful or not."""
        self._open_count -= 1
        self._last_change_at = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether no work is in progress."""
        return not self._open_count

    @property
    def stalled_s(self) -> float:
        """Seconds since any work ended, or since the first began; 0 while none is in progress."""
        return self._clock() - self._last_change_at if self._open_count else 0.0


class StallDetector:
    """A detector of a server that hangs: requests or launches are in progress, and none of them ends.

    Attributes:
        request_progress: of requests that have been received completely and not answered yet.
    """

    def __init__(self, stall_s: float, launches: CompletionTracker) -> None:
        """Args: launches: progress of the batches that the device's threads have not returned."""
        self._stall_s = stall_s
        self._launch_progress = launches
        self.request_progress = CompletionTracker()

    @property
    def stalled_s(self) -> float:
        """Seconds for which no request, or no launch, has ended while some were in progress."""
        return max(self.request_progress.stalled_s, self._launch_progress.stalled_s)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has ended for longer than the limit."""
        return self.stalled_s > self._stall_s

    def require_progress(self) -> None:
        """Raise StalledError if no request, or no launch, has ended for longer than the limit.

        Raises: StalledError: nothing has been finished for too long.
        """
        if self.is_stalled:
            raise StalledError(
                f"requests wait, and none has been finished for {self.stalled_s:.0f} s", _RETRY_AFTER_S
            )
