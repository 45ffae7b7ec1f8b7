"""Parsing of the JSON in safetensors headers: objects, arrays, strings and whole numbers, each key once.

Python's own parser does the work; this module refuses invalid input that the parser accepts.
"""

import json
import re
from typing import NoReturn

from normserve.errors import MalformedPayloadError

# A string that is never closed must match as well: searching again behind its quote would be quadratic.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)

# The character that a lone escape such as \ud800 leaves.
_SURROGATE = re.compile("[\ud800-\udfff]")

# 2^63 has 19 digits; longer numbers are no sizes and take quadratic time to convert.
_MAX_DIGITS = 19


def parse_object(text: str, max_depth: int) -> dict[str, object]:
    """Parse a JSON object, and refuse text that Python's own parser accepts although it is not valid here.

    Raises:
        MalformedPayloadError: it is no JSON object, nests deeper than `max_depth`, repeats a key, or
            holds a number that is negative, fractional, beyond 64 bits or not finite, or a string with
            a lone surrogate.
    """
    _check_depth(text, max_depth)
    try:
        result = json.loads(
            text,
            object_pairs_hook=_make_checked_object,
            parse_int=_parse_whole_number,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except json.JSONDecodeError as error:
        raise MalformedPayloadError(f"the header is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(result, dict):
        raise MalformedPayloadError("the header must be a JSON object")
    return result


def _check_depth(text: str, max_depth: int) -> None:
    """Raise MalformedPayloadError if the text nests deeper than allowed, before the recursive parser reads it."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        token = match[0]
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        if depth > max_depth:
            raise MalformedPayloadError(f"the header must nest at most {max_depth} levels deep")


def _make_checked_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make the dictionary of a JSON object from the pairs that Python's parser has read.

    Raises:
        MalformedPayloadError: a key is repeated, or a string has half of a surrogate pair.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MalformedPayloadError("the header repeats a key")
    if any(isinstance(text, str) and _SURROGATE.search(text) for pair in pairs for text in pair):
        raise MalformedPayloadError("a string in the header holds half of a surrogate pair")
    return result


def _parse_whole_number(digits: str) -> int:
    if digits.startswith("-") or len(digits) > _MAX_DIGITS:
        raise MalformedPayloadError("a number in the header must be whole and in [0, 2^63)")
    return int(digits)


def _refuse_number(_literal: str) -> NoReturn:
    raise MalformedPayloadError("a number in the header must be whole and in [0, 2^63)")
