"""The exit codes of a server, by which whoever started it decides whether to start it again."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the server process, by which a service manager decides whether to restart it."""

    STOPPED = 0
    """A stop by a signal."""
    FAILED = 1
    """A failure of the device, or an unexpected error: a new start may succeed."""
    MISCONFIGURED = 2
    """Settings with which the server cannot start: a new start fails as well."""


def describe_exit(code: int) -> dict[str, object]:
    """Return the log fields for a process's exit: its exit code, or for a negative `code` the name of the
    signal.
    """
    if code >= 0:
        return {"exit_code": code}
    try:
        return {"signal": signal.Signals(-code).name}
    except ValueError:
        # A real-time signal.
        return {"signal": str(-code)}
