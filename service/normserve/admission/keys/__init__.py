"""API keys: their file, what each may do, and the look-up of the key that a request brings."""

from normserve.admission.keys.file import ApiKey, KeyScope, KeysFileError, parse_keys
from normserve.admission.keys.keyring import Grant, Keyring
from normserve.admission.keys.reload import KeysFile

__all__ = ["ApiKey", "Grant", "KeyScope", "Keyring", "KeysFile", "KeysFileError", "parse_keys"]
