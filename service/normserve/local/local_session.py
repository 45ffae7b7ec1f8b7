"""The identity of a connection's client, from its greeting and from the operating system, and its permissions."""

import os
import socket
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys import KeyScope
from normserve.codec.local_messages import ALIGNMENT, MAX_FRAME_BYTES, VERSION, HelloMessage
from normserve.errors import ForbiddenError, InvalidParameterError, MalformedPayloadError
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.request_lifecycle import RequestLifecycle

_CREDENTIALS = struct.Struct("3i")
# Of Linux since 6.5; Python has no name for it.
_SO_PEERPIDFD = 77
_OVERFLOW_UID = 65534


class LocalSession:
    """The identity and permissions of one connection's client, from its hello message and its user id.

    Attributes:
        client_identity: the identity, as far as the client's messages have shown.
    """

    def __init__(self, uid: int, key_name: str | None, authorisation: KeyAuthorisation | None) -> None:
        """Args:
        key_name: name of the API key that is used for the user.
        authorisation: None where the server requires no key.
        """
        self.client_identity = ClientIdentity(f"uid {uid}")
        self._key_name = key_name
        self._key_authorisation = authorisation
        self._token: bytes | None = None
        self._has_received_hello = False

    def has_lasting_permission(self, sufficient_scopes: Set[KeyScope]) -> bool:
        """Return whether the client has one of these scopes until the server's keys change, so that its messages
        need no checks.  Keys that expire or have a rate or memory limit do not qualify.
        """
        if self._key_authorisation is None:
            return True
        grant = self._key_authorisation.find_key_entry(self._token, self._key_name)
        if grant is None or not sufficient_scopes & grant.key.scopes:
            return False
        return grant.token_bucket is None and grant.key.max_inflight_bytes is None and grant.key.expires is None

    def store_hello_and_make_response(
        self, message: HelloMessage, further_entries: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Store the API key of the client's hello message, without a check of the key; return the response's
        document.

        Args:
            further_entries: further entries of the document.

        Raises:
            InvalidParameterError: the client uses another version of the protocol.
        """
        if message.version != VERSION:
            raise InvalidParameterError(f"the protocol's version must be {VERSION}, got {message.version}")
        self._has_received_hello = True
        self._token = None if message.key is None else message.key.encode()
        # No key's name until the key is verified: a refused request must not be logged under another key.
        self.client_identity = ClientIdentity(self.client_identity.address)
        return {"version": VERSION, "alignment": ALIGNMENT, "max_frame_bytes": MAX_FRAME_BYTES, **further_entries}

    def authorise(self, sufficient_scopes: Set[KeyScope], request: RequestLifecycle) -> ClientIdentity:
        """Check that the client's key permits a message, count it towards the key's rate, and return the
        client's identity.

        Raises:
            MalformedPayloadError: the client has not sent `HelloMessage` before.
            UnauthorizedError, ForbiddenError, RateLimitedError: the client's key does not permit the message.
        """
        if not self._has_received_hello:
            raise MalformedPayloadError("the first message must be hello")
        request.client_identity = self.client_identity
        if self._key_authorisation is not None:
            try:
                self._key_authorisation.authorise_request(
                    request, self._token, sufficient_scopes, "local", request.record.op, self._key_name
                )
            finally:
                self.client_identity = request.client_identity
        return request.client_identity


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process id and user id of the process at the other end of a Unix socket connection.

    Attributes:
        pid: 0 where the process is in a namespace that this process does not see.
        uid: the process's user.
    """

    pid: int
    uid: int

    @classmethod
    def from_socket(cls, connection: socket.socket) -> "PeerProcess":
        """Read the process id and user id of a connection's peer from the operating system.

        Raises:
            OSError: the peer has ended.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        return cls(pid, uid & 0xFFFFFFFF)

    def open_exit_descriptor(self, connection: socket.socket) -> int | None:
        """Open a pidfd, a descriptor that is readable once the process has ended; return None if that is
        impossible.

        Args:
            connection: that of the process, still open: after its end the pid may belong to another process.
        """
        try:
            option = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            descriptor: int = struct.unpack("i", option)[0]
            os.set_inheritable(descriptor, False)
        except OSError:
            return self._open_by_pid()
        return descriptor

    def _open_by_pid(self) -> int | None:
        """Open the pidfd by process id, for kernels that cannot get it from a socket; return None if that fails."""
        try:
            return os.pidfd_open(self.pid) if self.pid > 0 else None
        except OSError:
            return None


class AllowedLocalUsers:
    """The users that may connect to the Unix socket, and the name of the API key that applies to each."""

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
        """Return the name of the API key that applies to a user; None if no key is set for the user.

        Raises:
            ForbiddenError: that user may not connect.
        """
        if uid == self._overflow_uid or uid not in self._key_names:
            raise ForbiddenError("this user may not connect: --local-users lists who may")
        return self._key_names[uid]


def _read_overflow_uid() -> int:
    """Read the user id that Linux shows for users of other user namespaces; return 65534 if it is unreadable."""
    try:
        return int(Path("/proc/sys/fs/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _OVERFLOW_UID
