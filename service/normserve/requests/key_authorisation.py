"""Authorisation of requests by API key, for all transports."""

import time
from collections.abc import Set

from normserve.admission.keys import Keyring, KeyringEntry, KeyScope
from normserve.errors import ForbiddenError, NormserveError, UnauthorizedError
from normserve.logs.audit import KeyRefusalLog
from normserve.requests.request_lifecycle import RequestLifecycle


class KeyAuthorisation:
    """The check of requests by API key: whether the key exists, has the needed scope, and is within its
    rate.  Refusals are written to the audit log.
    """

    def __init__(self, keys: Keyring, place: str) -> None:
        """Args: place: where a request must have its key, for the error message to clients without one."""
        self._keyring = keys
        self._key_location = place
        # Separate, so that guessed keys do not crowd out log lines about known keys.
        self._unknown_key_refusals, self._known_key_refusals = KeyRefusalLog(), KeyRefusalLog()

    def find_key_entry(self, token: bytes | None, key_name: str | None = None) -> KeyringEntry | None:
        """Return the keyring's entry for a request's key, or for `key_name` if the request has none.  Return
        None if there is no such key.

        Args:
            token: the key, None if the request has none.
            key_name: the name of the key that is used if the request has none.
        """
        if token is not None:
            return self._keyring.find_by_token(token)
        return None if key_name is None else self._keyring.find_by_name(key_name)

    def require_scope(
        self, grant: KeyringEntry | None, token: bytes | None, sufficient_scopes: Set[KeyScope] | None
    ) -> KeyringEntry:
        """Return the entry if its key is valid and has at least one of the scopes; raise an error if not.

        The request is neither counted towards the key's rate nor logged.

        Args:
            grant: the keyring's entry; None if the key is missing or unknown.
            token: the request's key, to distinguish a missing one from an unknown one.
            sufficient_scopes: scopes of which one is sufficient; None if none is.

        Raises:
            UnauthorizedError: the key is missing, unknown or expired.
            ForbiddenError: the key does not allow this.
        """
        if grant is None:
            if token is None:
                raise UnauthorizedError(f"an API key must be given {self._key_location}")
            raise UnauthorizedError("the API key is not one that the server knows")
        now = time.time()
        if sufficient_scopes is None:
            grant.require_unexpired(now)
            raise ForbiddenError("no API key may use this path")
        grant.require_any_scope(sufficient_scopes, now)
        return grant

    def authorise_request(
        self,
        request: RequestLifecycle,
        token: bytes | None,
        sufficient_scopes: Set[KeyScope] | None,
        method: str,
        path: str,
        key_name: str | None = None,
    ) -> None:
        """Check a request's key and count the request towards the key's rate.  The key's identity is set in the
        request, and a refusal is written to the audit log.

        Args:
            token, key_name: as for `find_key_entry`.
            sufficient_scopes: as for `require_scope`.
            method, path: the names of a refused request in the audit log.

        Raises:
            UnauthorizedError: the key is missing, unknown or expired.
            ForbiddenError: the key does not allow this.
            RateLimitedError: the key sent more requests per second than it may.
        """
        grant = self.find_key_entry(token, key_name)
        if grant is not None:
            request.client_identity = grant.get_identity(request.client_identity.address)
            request.record.key_name = grant.key.name
        try:
            self.require_scope(grant, token, sufficient_scopes).take_token()
        except (UnauthorizedError, ForbiddenError) as error:
            refusals = self._unknown_key_refusals if grant is None else self._known_key_refusals
            refusals.log_refusal(
                _classify_refusal(error, token, grant),
                method,
                path,
                key=request.record.key_name,
                address=request.client_identity.address,
                **request.log_fields,
            )
            raise


def _classify_refusal(error: NormserveError, token: bytes | None, grant: KeyringEntry | None) -> str:
    """Return the reason for the audit log: the key is absent, unknown, forbidden (lacks the scope) or expired."""
    if grant is None:
        return "absent" if token is None else "unknown"
    return "forbidden" if isinstance(error, ForbiddenError) else "expired"
