"""The identity of a connection's client, and its permissions."""

from collections.abc import Mapping, Set
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys import KeyScope
from normserve.codec.local_messages import ALIGNMENT, MAX_FRAME_BYTES, VERSION, HelloMessage
from normserve.errors import InvalidParameterError, MalformedPayloadError
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.lifecycle import RequestLifecycle


class LocalSession:
    """The identity of a client, from its greeting and from the kernel.

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

    def has_lasting_permission(self, needed: Set[KeyScope]) -> bool:
        """Return whether the client may send a message now and until the keys change."""
        if self._key_authorisation is None:
            return True
        grant = self._key_authorisation.find_key_entry(self._token, self._key_name)
        if grant is None or not needed & grant.key.scopes:
            return False
        return grant.token_bucket is None and grant.key.max_inflight_bytes is None and grant.key.expires is None

    def accept_hello(self, message: HelloMessage, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Handle the client's greeting; return the document of the response.

        Args: offered: further entries of the document.

        Raises:
            InvalidParameterError: the client uses another version of the protocol.
        """
        if message.version != VERSION:
            raise InvalidParameterError(f"the protocol's version must be {VERSION}, got {message.version}")
        self._has_received_hello = True
        self._token = None if message.key is None else message.key.encode()
        # No key's name until the key is verified: a refused request must not be logged under another key.
        self.client_identity = ClientIdentity(self.client_identity.address)
        return {"version": VERSION, "alignment": ALIGNMENT, "max_frame_bytes": MAX_FRAME_BYTES, **offered}

    def authorise(self, needed: Set[KeyScope], sent: RequestLifecycle) -> ClientIdentity:
        """Check that the client may send a message; return the client's identity.

        Raises:
            MalformedPayloadError: the client has not sent `HelloMessage` before.
            UnauthorizedError, ForbiddenError, RateLimitedError: the client's key does not permit the message.
        """
        if not self._has_received_hello:
            raise MalformedPayloadError("the first message must be hello")
        sent.client_identity = self.client_identity
        if self._key_authorisation is not None:
            try:
                self._key_authorisation.authorise_request(
                    sent, self._token, needed, "local", sent.record.op, self._key_name
                )
            finally:
                self.client_identity = sent.client_identity
        return sent.client_identity
