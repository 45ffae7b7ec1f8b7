"""JSON documents from a server."""

import json
from typing import Any, NoReturn


def parse_strict_json(body: bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is no JSON, nests deeper than Python's parser goes, names NaN or an infinity, which JSON
            does not have, or holds half of a surrogate pair, which is no text.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
