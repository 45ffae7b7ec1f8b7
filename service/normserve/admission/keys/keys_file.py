"""The file of API keys: TOML, one table `[[keys]]` for each, with the SHA-256 of the key instead of the key.

`KeysFileReader` reads the file again when it changes.  `generate_key` and `format_key_table` make a new key and
its table.
"""

import asyncio
import hashlib
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from normserve.regular_files import open_regular_file

log = logging.getLogger(__name__)

#: Each key has series of its own in the metrics.
MAX_KEYS = 1000

#: Allowed names of keys: they appear in logs and metrics.
_KEY_NAME = r"[A-Za-z0-9._-]{1,64}"

_RANDOM_BYTES = 32

_EVERY_S = 1.0
_MAX_FILE_BYTES = 2**20


class KeyScope(StrEnum):
    """A permission of an API key."""

    INFER = "infer"
    LAYERS = "layers"
    METRICS = "metrics"


class KeysFileError(ValueError):
    """The file of API keys cannot be read, or is invalid.  The message quotes no value, which might be a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The name, permissions and limits of one API key, with the key's hash in place of the key.

    Attributes:
        name: the key's name in logs and metrics.
        digest: SHA-256 of the key, 32 bytes.
        scopes: the key's permissions.
        expires: the time from which it is refused, in seconds since 1970; None for never.
        requests_per_second: limit of its mean request rate; None for no limit.
        max_inflight_bytes: limit of the bytes of all its requests in progress; None for the server's
            limit.
    """

    name: str
    digest: bytes
    scopes: frozenset[KeyScope]
    expires: float | None = None
    requests_per_second: float | None = None
    max_inflight_bytes: int | None = None


class _KeyTable(BaseModel):
    """One `[[keys]]` table of the TOML file of API keys; `may` lists the key's scopes."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str
    sha256: str
    may: list[str] = Field(min_length=1)
    expires: datetime | None = None
    requests_per_second: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    max_inflight_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None

    @field_validator("name")
    @classmethod
    def _validate_name(cls, name: str) -> str:
        _require_key_name(name, "")
        return name

    @field_validator("sha256")
    @classmethod
    def _validate_sha256(cls, sha256: str) -> str:
        if re.fullmatch("[0-9A-Fa-f]{64}", sha256) is None:
            raise ValueError("must be 64 hexadecimal digits; normserve api-key NAME makes an entry")
        return sha256

    @field_validator("may")
    @classmethod
    def _validate_scopes(cls, may: list[str]) -> list[str]:
        if len(set(may)) < len(may) or not set(may) <= set(KeyScope):
            raise ValueError("must be a list of " + ", ".join(KeyScope) + ", each once at most")
        return may

    @field_validator("expires")
    @classmethod
    def _validate_expiry(cls, expires: datetime | None) -> datetime | None:
        if expires is not None and expires.tzinfo is None:
            raise ValueError("must be a date and a time with an offset, as in 2030-01-31T12:00:00Z")
        return expires

    def to_api_key(self) -> ApiKey:
        return ApiKey(
            name=self.name,
            digest=bytes.fromhex(self.sha256),
            scopes=frozenset(map(KeyScope, self.may)),
            expires=None if self.expires is None else self.expires.timestamp(),
            requests_per_second=self.requests_per_second,
            max_inflight_bytes=self.max_inflight_bytes,
        )


class _KeysDocument(BaseModel):
    """The parsed content of the TOML file of API keys."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    keys: list[_KeyTable] = Field(min_length=1, max_length=MAX_KEYS)


def parse_keys(content: bytes) -> tuple[ApiKey, ...]:
    """Parse the content of a file of keys; the keys are in the order of the file.

    Raises:
        KeysFileError: the content is invalid; the message has the position of the first fault.
    """
    try:
        tables = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError):
        # Errors of the parser quote the file, which may contain a key.
        raise KeysFileError("it is not well-formed TOML in UTF-8") from None
    try:
        keys = tuple(entry.to_api_key() for entry in _KeysDocument.model_validate(tables).keys)
    except ValidationError as error:
        raise KeysFileError(_describe_fault(error)) from None
    _require_unique("name", [key.name for key in keys])
    _require_unique("sha256", [key.digest for key in keys])
    return keys


def _describe_fault(error: ValidationError) -> str:
    """Format the first fault with its position in the file, as `keys[2].sha256: …`.

    The names of unknown fields are left out, because they might be keys.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # An unknown field may be a key that was written in the wrong place.
    field_names = {*_KeysDocument.model_fields, *_KeyTable.model_fields}
    where = ""
    for part in first["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += ("." if where else "") + (part if part in field_names else "(another field)")
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def _require_unique(field: str, values: Sequence[object]) -> None:
    """Refuse the file if two of its keys have the same value of a field; `values` has one value per key.

    Raises:
        KeysFileError: two keys have the same value; the message has their positions.
    """
    seen: dict[object, int] = {}
    for index, value in enumerate(values):
        if value in seen:
            raise KeysFileError(f"keys[{index}].{field} is that of keys[{seen[value]}] again")
        seen[value] = index


def _require_key_name(name: str, subject: str) -> None:
    if re.fullmatch(_KEY_NAME, name) is None:
        raise ValueError(f"{subject}must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")


def generate_key() -> str:
    """Generate a key of 256 random bits."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def format_key_table(name: str, key: str) -> str:
    """Format the `[[keys]]` table for a new key: its name, its SHA-256 and the scope `infer`.

    Raises:
        ValueError: the name is invalid.
    """
    _require_key_name(name, "a key's name ")
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\nmay = ["infer"]\n'


_Fingerprint = tuple[int, ...]


class KeysFileReader:
    """A reader of the file of API keys, which can poll the file and read it again after each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_fingerprint: _Fingerprint | None = None
        self._has_warned = False

    def read(self) -> tuple[ApiKey, ...]:
        """Read and parse the file of keys; warn if every user of the host can read or write it.

        After an error, the next poll reads the file again even if it has not changed.

        Raises:
            KeysFileError: the file cannot be read, or is invalid.
        """
        self._last_fingerprint = None
        try:
            with open_regular_file(self._path) as file:
                before = os.fstat(file.fileno())
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeysFileError(f"{self._path}: {error.strerror or 'cannot be read'}") from None
        self._warn_if_world_accessible(before.st_mode)
        if len(content) > _MAX_FILE_BYTES:
            raise KeysFileError(f"{self._path}: it must be at most {_MAX_FILE_BYTES} bytes")
        try:
            keys = parse_keys(content)
        except KeysFileError as error:
            raise KeysFileError(f"{self._path}: {error}") from None
        self._last_fingerprint = _make_fingerprint(before)
        return keys

    async def poll_changes(self, apply: Callable[[tuple[ApiKey, ...]], None], every_s: float = _EVERY_S) -> None:
        """Check the file every `every_s` seconds until cancelled; call `apply` with the keys of each new valid
        version.

        An invalid file leaves the keys as they are, and is logged once as an error when the next poll finds
        the same fault: a file that is being written in place is empty or incomplete for a moment.
        """
        found = logged = None
        while True:
            await asyncio.sleep(every_s)
            try:
                # The file may be on a slow file system.
                keys = await asyncio.to_thread(self._read_if_changed)
            except Exception as error:
                # Whatever it is: a server that stopped reading the file would never learn of a revoked key.
                fault = str(error) if isinstance(error, KeysFileError) else f"{self._path}: {type(error).__name__}"
                if fault == found != logged:
                    log.error("the new file of API keys cannot be used, the old keys stay in use: %s", fault)
                    logged = fault
                found = fault
                continue
            found = None
            if keys is not None:
                logged = None
                apply(keys)

    def _read_if_changed(self) -> tuple[ApiKey, ...] | None:
        """Read and return the keys if the file has changed since the last read; else return None.

        Return None if it is unchanged, or if it changed again during the read: the next poll then reads it.
        """
        try:
            now = _make_fingerprint(self._path.stat())
        except OSError:
            return self.read()
        if now == self._last_fingerprint:
            return None
        keys = self.read()
        try:
            if _make_fingerprint(self._path.stat()) != now:
                # The file is being written: a part of it may be valid, with fewer keys.
                self._last_fingerprint = None
                return None
        except OSError:
            self._last_fingerprint = None
            return None
        return keys

    def _warn_if_world_accessible(self, mode: int) -> None:
        """Warn if the file's `mode` lets every user read or write it.  The warning is repeated only if the mode was
        correct in between.
        """
        exposed = bool(mode & (stat.S_IROTH | stat.S_IWOTH))
        if exposed and not self._has_warned:
            log.warning("the file of API keys can be read or written by every user: %s", self._path)
        self._has_warned = exposed


def _make_fingerprint(state: os.stat_result) -> _Fingerprint:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
