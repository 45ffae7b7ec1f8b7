"""TOML tables read key by key, with uniform errors for missing, invalid and unknown keys."""

import difflib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

from normserve.codec.shapes import MAX_RANK

_MISSING: Any = object()

#: Limit of amounts, shares and rates: far above any use, and far below the limits of floats and clocks.
MOST = 1e9

# Limit of one tensor; the servers' own limits are far lower.
_MOST_ELEMENTS = 2**32


class ScenarioError(ValueError):
    """An error in a scenario; the message names the location and the expected value."""


class TomlTable:
    """A TOML table whose keys are taken one by one, each with a check of its value.

    `check_no_unknown_keys` then refuses the keys that were not taken.  Each `take_` method raises
    `ScenarioError` for an invalid value, and for a missing key that has no default.
    """

    def __init__(self, where: str, entries: Mapping[str, Any]) -> None:
        self.location = where
        self._entries = dict(entries)
        self._requested_keys: list[str] = []

    def has_key(self, key: str) -> bool:
        """Return whether the table has the key."""
        self._requested_keys.append(key)
        return key in self._entries

    def take_value(self, key: str, default: Any = _MISSING) -> Any:
        """Take the value of a key, which may have any type; without the key, return the default.

        Raises:
            ScenarioError: it is missing, and there is no default.
        """
        self._requested_keys.append(key)
        if key in self._entries:
            return self._entries.pop(key)
        if default is _MISSING:
            raise ScenarioError(f"{self.location}: {key} is missing")
        return default

    def take_text(self, key: str, default: str = _MISSING) -> str:
        """Take a string."""
        return str(self._take_checked(key, default, lambda value: isinstance(value, str), "a string"))

    def take_one_of(self, key: str, allowed: Sequence[str], default: str = _MISSING) -> str:
        """Take one of the allowed strings."""
        return str(self._take_checked(key, default, lambda value: value in allowed, f"one of {', '.join(allowed)}"))

    def take_flag(self, key: str, default: bool = _MISSING) -> bool:
        """Take true or false."""
        return bool(self._take_checked(key, default, lambda value: isinstance(value, bool), "true or false"))

    def take_positive_count(self, key: str, default: int = _MISSING, most: int = 10**9) -> int:
        """Take a whole number from 1 to `most`."""
        value = self._take_checked(
            key, default, lambda value: _is_integer(value) and value > 0, "a whole number above 0", most
        )
        return int(value)

    def take_positive_number(self, key: str, default: float = _MISSING, most: float = MOST) -> float:
        """Take a finite number above 0 and up to `most`."""
        value = self._take_checked(
            key, default, lambda value: is_number(value) and value > 0, "a number above 0", most
        )
        return float(value)

    def take_number(self, key: str) -> float:
        """Take a finite number."""
        return float(self._take_checked(key, _MISSING, is_number, "a number"))

    def take_nonnegative_seconds(self, key: str, default: float = _MISSING) -> float:
        """Take a finite number of seconds, 0 or more."""
        value = self._take_checked(
            key, default, lambda value: is_number(value) and value >= 0, "a number that is not negative", MOST
        )
        return float(value)

    def take_shape(self, key: str) -> tuple[int, ...]:
        """Take the shape of a tensor: a list of whole numbers above 0, with a limited product."""
        value = self.take_value(key)
        if not isinstance(value, list) or not value or not all(_is_integer(size) and size > 0 for size in value):
            raise ScenarioError(
                f"{self.location}: {key} must be a list of whole numbers above 0, got {format_value(value)}"
            )
        if len(value) > MAX_RANK or prod(value) > _MOST_ELEMENTS:
            raise ScenarioError(
                f"{self.location}: {key} must have at most {_MOST_ELEMENTS} elements, got {format_value(value)}"
            )
        return tuple(value)

    def take_table(self, key: str) -> "TomlTable":
        """Take a table within this one; an empty one if it is missing."""
        value = self._take_checked(key, {}, lambda value: isinstance(value, dict), "a table")
        return TomlTable(f"{self.location}: [{key}]", value)

    def take_tables_or_empty(self, key: str) -> list["TomlTable"]:
        """Take an array of tables; without the key, return an empty list."""
        value = self._take_checked(
            key,
            [],
            lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
            "an array of tables",
        )
        return [TomlTable(f"{self.location}: [[{key}]] {number}", each) for number, each in enumerate(value, 1)]

    def take_remaining(self) -> dict[str, Any]:
        """Take all remaining keys."""
        remaining, self._entries = self._entries, {}
        return remaining

    def check_no_unknown_keys(self) -> None:
        """Raise an error if the table has a key that was not taken; the message suggests a similar key, or
        lists the known ones.

        Raises: ScenarioError: a key was not taken.
        """
        for key in self._entries:
            known = list(dict.fromkeys(self._requested_keys))
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            raise ScenarioError(f"{self.location}: {key} is unknown; {hint}")

    def _take_checked(self, key: str, default: Any, is_valid: Any, expected: str, most: float | None = None) -> Any:
        """Take a key's value, which must satisfy `is_valid` and be at most `most`; without the key, return the
        default unchecked.

        Args:
            is_valid: returns whether a value is valid.
            expected: describes a valid value in messages.

        Raises:
            ScenarioError: the value is not valid, or it is missing and there is no default.
        """
        if key not in self._entries:
            return self.take_value(key, default)
        value = self.take_value(key)
        if not is_valid(value):
            raise ScenarioError(f"{self.location}: {key} must be {expected}, got {format_value(value)}")
        if most is not None and value > most:
            raise ScenarioError(f"{self.location}: {key} must be at most {most:g}, got {format_value(value)}")
        return value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a TOML value is a number; not a boolean, not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def format_value(value: object) -> str:
    """Format a value for an error message, in at most 100 characters."""
    try:
        text = repr(value)
    # An integer with thousands of digits.
    except ValueError:
        text = "a number too long to show"
    return text if len(text) <= 100 else text[:99] + "…"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
