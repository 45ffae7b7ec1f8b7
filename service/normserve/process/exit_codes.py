"""The exit codes of a server, by which whoever started it decides whether to start it again."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the server process, by which a service manager decides whether to restart it."""

    STOPPED = 0
    """A stop by a signal."""
    FAILED = 1
    """A failure of the device, or an unexpected error: a new start may succeed."""
    MISCONFIGURED = 2
    """Settings with which the server cannot start: a new start fails as well."""
