"""API keys: their file, their scopes and limits, and the lookup of a request's key."""

from normserve.admission.keys.file import ApiKey, KeyScope, KeysFileError, parse_keys
from normserve.admission.keys.keyring import Grant, Keyring
from normserve.admission.keys.reload import KeysFile

__all__ = ["ApiKey", "Grant", "KeyScope", "Keyring", "KeysFile", "KeysFileError", "parse_keys"]
