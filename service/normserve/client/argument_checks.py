"""Checks of the arguments of a client's constructor."""

import threading
from numbers import Integral, Real
from typing import SupportsFloat, SupportsInt


def check_type(name: str, value: object, kinds: type | tuple[type | None, ...], expected: str) -> None:
    """Raise TypeError unless an argument is of one of the accepted types.

    Args:
        name: the argument's name, for the error's message.
        kinds: the accepted types, or None for the value None; a bool is no number unless bool is among them.
        expected: names the types in the error's message.

    Raises:
        TypeError: the argument is of none of them.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    of_kind = (value is None and None in allowed) or isinstance(value, tuple(each for each in allowed if each))
    if not of_kind or (isinstance(value, bool) and bool not in allowed):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_count(name: str, value: SupportsInt, least: int) -> None:
    """Require an integer of at least `least`.

    Raises:
        TypeError, ValueError: it is of another type, or less.
    """
    check_type(name, value, Integral, "an int")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_pause_s(name: str, value: SupportsFloat) -> None:
    """Require a number of seconds from 0 to the longest time that the operating system can wait.

    Raises:
        TypeError, ValueError: the value is no number, or is negative, infinite or too large.
    """
    check_type(name, value, Real, "a number")
    if not 0 <= float(value) <= threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")
