"""The exit codes of a server, by which whoever started it decides whether to start it again."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a server ended."""

    STOPPED = 0
    """It was told to stop, and did."""
    FAILED = 1
    """Its device failed, or something that nobody expected happened: a new start may mend it."""
    MISCONFIGURED = 2
    """It cannot start with its settings: a new start mends nothing."""
