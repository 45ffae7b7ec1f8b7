"""Whether programs of one launch may wait for one another.

Rows and groups that fill more than one program are fastest shared: each program tells the others its moments and
waits for theirs.  Such a launch is cooperative, so the device starts all of its programs together or refuses it.
Without, they are read twice, by kernels whose programs wait for nothing.
"""

from fusednorm.devices.device import INTERPRETED

_allowed = True


def allow_waiting(allowed: bool) -> None:
    """From now on let launches of this process be cooperative, as at first, or none.

    For a device that refuses them, or whose other work must never be held up by one.  Kernels of both forms round
    differently.
    """
    global _allowed
    _allowed = allowed


def may_wait() -> bool:
    """Whether the next launch may be cooperative; none is in the interpreter, which runs one program at a time."""
    return _allowed and not INTERPRETED
