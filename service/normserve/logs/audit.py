"""The audit trail: one line for each security-relevant event, with the logger `normserve.audit`.

Events are changes of layers, refused keys, reloads of keys, and the start, drain and end of the process.  A line
has the name of the event and fields, but never a key or another secret.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger("normserve.audit")

# A stranger who tries keys shall not fill the log.
_REFUSALS_A_SECOND = 10
_LONGEST_PATH = 200


def log_start(version: str, settings: Mapping[str, object]) -> None:
    """Log that the process begins to serve; `settings` without secrets."""
    _log_event("start", version=version, settings=dict(settings))


def log_drain() -> None:
    """Log that the process drains: it finishes admitted requests, then ends."""
    _log_event("drain")


def log_end(exit_code: int) -> None:
    """Log that the process has served its last request."""
    _log_event("end", exit_code=exit_code)


def log_keys_loaded(names: Sequence[str]) -> None:
    """Log the names of the API keys that are valid from now on."""
    _log_event("keys_loaded", count=len(names), names=list(names))


def log_layer_change(method: str, path: str, result: str, **who: str | None) -> None:
    """Log a client's request to register or to remove a layer; `result` is its outcome."""
    _log_event("layer_change", method=method, path=path[:_LONGEST_PATH], result=result, **who)


class KeyRefusalLog:
    """The audit log of requests that were refused for lack of a valid key, with a limited number of lines
    per second.

    Refusals beyond the limit are only counted, and the count is logged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second_began_at = clock()
        self._logged_count = 0
        self._omitted_count = 0
        self._timer: asyncio.TimerHandle | None = None

    def log_refusal(self, reason: str, method: str, path: str, **who: str | None) -> None:
        """Log a refused request; if this second's limit is reached, only count it.

        Args: who: fields that identify the client.
        """
        now = self._clock()
        if now - self._second_began_at >= 1:
            self.log_omitted_count()
            self._second_began_at, self._logged_count = now, 0
        if self._logged_count < _REFUSALS_A_SECOND:
            self._logged_count += 1
            _log_event("key_refused", reason=reason, method=method, path=path[:_LONGEST_PATH], **who)
            return
        self._omitted_count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1, self.log_omitted_count)

    def log_omitted_count(self) -> None:
        """Log how many refusals were counted and not logged since the last such line; do nothing if there were
        none.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._omitted_count:
            _log_event("keys_refused", count=self._omitted_count)
            self._omitted_count = 0


def _log_event(event: str, **fields: object) -> None:
    _log.info(event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})
