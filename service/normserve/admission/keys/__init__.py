"""API keys: their file, their scopes and limits, and the lookup of a request's key."""

from normserve.admission.keys.keyring import Keyring, KeyringEntry
from normserve.admission.keys.keys_file import ApiKey, KeyScope, KeysFileError, KeysFileReader, parse_keys

__all__ = ["ApiKey", "KeyScope", "Keyring", "KeyringEntry", "KeysFileError", "KeysFileReader", "parse_keys"]
