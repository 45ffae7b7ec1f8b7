"""Generation of an API key and of its entry in the file of keys."""

import hashlib
import re
import secrets

from normserve.admission.keys.keys_file import KEY_NAME

_RANDOM_BYTES = 32


def generate_key() -> str:
    """Generate a key of 256 random bits."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def format_key_table(name: str, key: str) -> str:
    """Format the TOML table of a key with the scope `infer`.

    Raises:
        ValueError: the name is invalid.
    """
    if not re.fullmatch(KEY_NAME, name):
        raise ValueError("a key's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\nmay = ["infer"]\n'
