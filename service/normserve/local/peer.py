"""The identity of the process at the other end of a Unix socket, from the kernel."""

import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from normserve.errors import ForbiddenError

_CREDENTIALS = struct.Struct("3i")
# Of Linux since 6.5; Python has no name for it.
_SO_PEERPIDFD = 77
_OVERFLOW_UID = 65534


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at the other end of a connection.

    Attributes:
        pid: 0 where the process is in a namespace that this process does not see.
        uid: the process's user.
    """

    pid: int
    uid: int

    @classmethod
    def from_socket(cls, connection: socket.socket) -> "PeerProcess":
        """Read the credentials of a connection's peer from the kernel.

        Raises:
            OSError: the peer has ended.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        return cls(pid, uid & 0xFFFFFFFF)

    def open_exit_descriptor(self, connection: socket.socket) -> int | None:
        """Open a descriptor that is readable once the process has ended; None where the kernel gives none.

        Args: connection: that of the process, still open: after its end the pid may belong to another process.
        """
        try:
            option = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            descriptor: int = struct.unpack("i", option)[0]
            os.set_inheritable(descriptor, False)
        except OSError:
            return self._open_by_pid()
        return descriptor

    def _open_by_pid(self) -> int | None:
        try:
            return os.pidfd_open(self.pid) if self.pid > 0 else None
        except OSError:
            return None


class LocalUsers:
    """The users that may connect, and the API key that is used for each."""

    def __init__(self, listed: str) -> None:
        """Args: listed: the value of the setting: `UID` or `UID=KEY`, separated by commas."""
        entries = [entry.partition("=") for entry in listed.split(",") if entry]
        self._key_names: Mapping[int, str | None] = {os.geteuid(): None} | {
            int(uid): key or None for uid, _, key in entries
        }
        # The id of every user of another user namespace.
        self._overflow_uid = _read_overflow_uid()

    @property
    def has_other_users(self) -> bool:
        """Whether users other than the server's own may connect."""
        return len(self._key_names) > 1

    def find_key_name(self, uid: int) -> str | None:
        """Return the name of the API key with a user's scopes and limits; None where the user has none.

        Raises:
            ForbiddenError: that user may not connect.
        """
        if uid == self._overflow_uid or uid not in self._key_names:
            raise ForbiddenError("this user may not connect: --local-users lists who may")
        return self._key_names[uid]


def _read_overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/fs/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _OVERFLOW_UID
