"""Logging: one format, to stderr."""

import logging
import time

_FORMAT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log the server's own words from `level` on; of the HTTP library's only errors.

    It warns of each malformed request, and strangers shall not fill the log.
    """
    logging.basicConfig(format=_FORMAT, level=level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


class Throttled:
    """Logs at most once a second what strangers can bring about as often as they like."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next = 0.0
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        if self._left_out:
            message, arguments = message + " (and %d times since the last such line)", (*arguments, self._left_out)
        self._next, self._left_out = now + 1.0, 0
        self._log.warning(message, *arguments)
