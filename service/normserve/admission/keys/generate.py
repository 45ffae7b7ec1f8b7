"""Generation of an API key and of its entry in the file of keys."""

import hashlib
import re
import secrets

from normserve.admission.keys.file import KEY_NAME

_RANDOM_BYTES = 32


def generate_key() -> str:
    """A key of 256 random bits."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def format_key_table(name: str, key: str) -> str:
    """The TOML table of a key that may run the operations.

    Raises:
        ValueError: no key can have that name.
    """
    if not re.fullmatch(KEY_NAME, name):
        raise ValueError("a key's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\nmay = ["infer"]\n'
