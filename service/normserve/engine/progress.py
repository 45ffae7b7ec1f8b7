"""Detection of work that does not finish.

Not thread-safe: it belongs to the event loop's thread.
"""

import time
from collections.abc import Callable

from normserve.errors import StalledError

_RETRY_AFTER_S = 5.0


class CompletionTracker:
    """Pieces of work that are begun and ended, and for how long none has been ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_count = 0
        self._last_change_at = 0.0

    def begin_work(self) -> None:
        """One more is to be finished."""
        if not self._open_count:
            self._last_change_at = self._clock()
        self._open_count += 1

    def end_work(self) -> None:
        """One is finished, whatever came of it."""
        self._open_count -= 1
        self._last_change_at = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was begun has ended."""
        return not self._open_count

    @property
    def stalled_s(self) -> float:
        """Seconds since anything was finished, or since there was anything to finish; 0 while there is nothing."""
        return self._clock() - self._last_change_at if self._open_count else 0.0


class StallDetector:
    """Notices that nothing is finished any more, of requests or on the device.

    Attributes:
        request_progress: those received whole and not answered yet.
    """

    def __init__(self, stall_s: float, launches: CompletionTracker) -> None:
        """Args: launches: what the device's threads were given and have not returned."""
        self._stall_s = stall_s
        self._launch_progress = launches
        self.request_progress = CompletionTracker()

    @property
    def stalled_s(self) -> float:
        """For how long nothing has been finished that could be."""
        return max(self.request_progress.stalled_s, self._launch_progress.stalled_s)

    @property
    def is_stalled(self) -> bool:
        """It has been too long."""
        return self.stalled_s > self._stall_s

    def require_progress(self) -> None:
        """Raises: StalledError: nothing has been finished for too long."""
        if self.is_stalled:
            raise StalledError(
                f"requests wait, and none has been finished for {self.stalled_s:.0f} s", _RETRY_AFTER_S
            )
