"""The setting whether programs of one launch may wait for one another.

Rows and groups that are too large for one program are processed fastest by several programs, which exchange their
moments and wait for each other's.  Such a launch is cooperative: the device starts all programs together or
reports an error.  If waiting is not allowed, such rows and groups are read twice, by kernels whose programs do not
wait.
"""

from fusednorm.devices.device import INTERPRETED

_allowed = True


def allow_waiting(allowed: bool) -> None:
    """Allow (the initial state) or forbid cooperative launches of this process from now on.

    Forbid them for a device that refuses them, or whose other work they must never delay.  The kernels used instead
    round differently.
    """
    global _allowed
    _allowed = allowed


def may_wait() -> bool:
    """Return whether the next launch may be cooperative.

    In the interpreter it never may, since one program runs at a time.
    """
    return _allowed and not INTERPRETED
