"""Reloading of the file of API keys when it changes."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from normserve.admission.keys.keys_file import ApiKey, KeysFileError, parse_keys
from normserve.regular_files import open_regular_file

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_MAX_BYTES = 2**20

_Fingerprint = tuple[int, ...]


class KeysFileReader:
    """Reads a file of keys, and reads it again when its fingerprint changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_fingerprint: _Fingerprint | None = None
        self._has_warned = False

    def read(self) -> tuple[ApiKey, ...]:
        """Read the keys from the file.

        After an error, the next poll reads the file again even if it has not changed.

        Raises:
            KeysFileError: the file cannot be read, or is invalid.
        """
        self._last_fingerprint = None
        try:
            with open_regular_file(self._path) as file:
                before = os.fstat(file.fileno())
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise KeysFileError(f"{self._path}: {error.strerror or 'cannot be read'}") from None
        self._warn_if_world_accessible(before.st_mode)
        if len(content) > _MAX_BYTES:
            raise KeysFileError(f"{self._path}: it must be at most {_MAX_BYTES} bytes")
        try:
            keys = parse_keys(content)
        except KeysFileError as error:
            raise KeysFileError(f"{self._path}: {error}") from None
        self._last_fingerprint = _make_fingerprint(before)
        return keys

    async def poll_changes(self, apply: Callable[[tuple[ApiKey, ...]], None], every_s: float = _EVERY_S) -> None:
        """Poll the file until cancelled; call `apply` with the keys of each changed and valid version.

        An invalid file leaves the keys as they are, and is logged once as an error when the next poll finds the
        same fault: a file that is being written in place is empty or incomplete for a moment.
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
        exposed = bool(mode & (stat.S_IROTH | stat.S_IWOTH))
        if exposed and not self._has_warned:
            log.warning("the file of API keys can be read or written by every user: %s", self._path)
        self._has_warned = exposed


def _make_fingerprint(state: os.stat_result) -> _Fingerprint:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
