"""The setting whether programs of one launch may wait for one another.

Rows and groups that are too large for one program are processed fastest by several programs, which exchange their
moments and wait for each other's.  Such a launch is cooperative: the device starts all programs together or
reports an error.  If waiting is not allowed, such rows and groups are read twice, by kernels whose programs do not
wait.
"""

from fusednorm.devices.device_properties import INTERPRETED

_allowed = True


def allow_waiting(allowed: bool) -> None:
    """Allow or forbid cooperative launches, whose programs wait for one another, from now on.

    It holds for all later launches of the process; they are initially allowed.  Forbid them for a device that
    refuses them, or whose other work they must never delay.  The kernels used instead round differently.  CPU
    tensors are computed in the same way either way.

    Args:
        allowed: True allows cooperative launches; False forbids them.

    Examples:
        >>> import fusednorm
        >>> fusednorm.allow_waiting(False)
        >>> fusednorm.allow_waiting(True)
    """
    global _allowed
    _allowed = allowed


def may_wait() -> bool:
    """Return whether the programs of the next launch may wait for one another (a cooperative launch).

    In the interpreter it never may, since one program runs at a time.
    """
    return _allowed and not INTERPRETED
