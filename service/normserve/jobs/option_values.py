"""The values of options, read from the text that a request has for them."""

import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestParameter:
    """One parameter of requests: its description for the API's documentation, and its parser.

    Attributes:
        parse: from text to value; a ValueError's message ends the sentence "name must be …".
        schema: its JSON schema, for the API's description.
    """

    doc: str
    parse: Callable[[str], Any]
    schema: dict[str, Any]


def make_choice_parameter(doc: str, names: Iterable[str], make: Callable[[str], Any] = str) -> RequestParameter:
    """Describe a parameter whose value is one of these names.

    Args: make: from a name to the value.
    """
    accepted_names = list(names)

    def parse(text: str) -> Any:
        if text not in accepted_names:
            raise ValueError("one of " + ", ".join(accepted_names))
        return make(text)

    return RequestParameter(doc, parse, {"enum": accepted_names})


def parse_number(text: str) -> float:
    """Parse a decimal number of at most 64 characters.

    Raises:
        ValueError: the text is none; the message names the expected value, here and in the other
            parsers.
    """
    if len(text) > 64 or not _NUMBER.fullmatch(text):
        raise ValueError("a number")
    return float(text)


def parse_integer(text: str) -> int:
    """Parse a whole number of at most 19 digits."""
    if not _WHOLE.fullmatch(text):
        raise ValueError("a whole number")
    return int(text)


def parse_eps(text: str) -> float:
    """Parse an eps that kernels can use: a number that is above 0 and finite as a float32."""
    value = parse_number(text)
    if not 0 < _round_to_float32(value) < math.inf:
        raise ValueError("a float32 above 0 and finite")
    return min(value, MAX_FLOAT32)


def parse_slope(text: str) -> float:
    """Parse a slope that kernels can use: a number that is finite as a float32."""
    value = parse_number(text)
    if math.isinf(_round_to_float32(value)):
        raise ValueError("a finite float32")
    # As it is written, the largest float32 is a little more than its value; -0 would equal 0 in a batch's key.
    return max(-MAX_FLOAT32, min(value, MAX_FLOAT32)) + 0.0


def _round_to_float32(value: float) -> float:
    """Round a number as kernels do, which compute with float32 options; infinite beyond the largest float32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def parse_positive_integer(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = parse_integer(text)
    if value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def parse_zero_or_one(text: str) -> float:
    """Parse 0 or 1."""
    value = parse_number(text)
    if value not in (0.0, 1.0):
        raise ValueError("0 or 1")
    return value


def parse_probability(text: str) -> float:
    """Parse a probability of at least 0 and less than 1."""
    value = parse_number(text)
    if not 0 <= value < 1:
        raise ValueError("a probability in [0, 1)")
    return value


def parse_seed(text: str) -> int:
    """Parse a signed 64-bit integer."""
    value = int(text) if _WHOLE.fullmatch(text) else None
    if value is None or not -(2**63) <= value < 2**63:
        raise ValueError("a whole number from -2^63 to 2^63 - 1")
    return value


def parse_flag(text: str) -> bool:
    """Parse `true` or `false`, or 1 or 0."""
    if text not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return text in ("true", "1")
