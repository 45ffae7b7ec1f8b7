"""Decides by API key whether a request is allowed, the same for every transport."""

import time
from collections.abc import Set

from normserve.admission.keys import Keyring, KeyringEntry, KeyScope
from normserve.errors import ForbiddenError, NormserveError, UnauthorizedError
from normserve.logs.audit import KeyRefusalLog
from normserve.requests.lifecycle import RequestLifecycle


class KeyAuthorisation:
    """Admits requests by their keys, where keys are required."""

    def __init__(self, keys: Keyring, place: str) -> None:
        """Args: place: where clients give their key, for the message to those who give none."""
        self._keys = keys
        self._place = place
        # Separate, so that guessed keys do not crowd out log lines about known keys.
        self._refused_strangers, self._refused_keys = KeyRefusalLog(), KeyRefusalLog()

    def find(self, token: bytes | None, key_name: str | None = None) -> KeyringEntry | None:
        """Return what a request's key is known as; None if it is not.

        Args:
            token: the key, None if the request has none.
            key_name: the name of the key that is used in its place.
        """
        if token is not None:
            return self._keys.find(token)
        return None if key_name is None else self._keys.named(key_name)

    def require(
        self, grant: KeyringEntry | None, token: bytes | None, needed: Set[KeyScope] | None
    ) -> KeyringEntry:
        """Return the grant if it allows a request; counts and logs nothing.

        Args: needed: scopes of which one is sufficient; None if none is.

        Raises:
            UnauthorizedError: the key is missing, unknown or expired.
            ForbiddenError: the key does not allow this.
        """
        if grant is None:
            if token is None:
                raise UnauthorizedError(f"an API key must be given {self._place}")
            raise UnauthorizedError("the API key is not one that the server knows")
        now = time.time()
        if needed is None:
            grant.require_valid(now)
            raise ForbiddenError("no API key may use this path")
        grant.require_scope(needed, now)
        return grant

    def admit(
        self,
        request: RequestLifecycle,
        token: bytes | None,
        needed: Set[KeyScope] | None,
        method: str,
        path: str,
        key_name: str | None = None,
    ) -> None:
        """Admit a request, and write its caller into it.

        Args:
            token, key_name: as for `find`.
            needed: as for `require`.
            method, path: by which the audit trail names a request that is refused.

        Raises:
            UnauthorizedError: the key is missing, unknown or expired.
            ForbiddenError: the key does not allow this.
            RateLimitedError: the key sent more requests per second than it may.
        """
        grant = self.find(token, key_name)
        if grant is not None:
            request.caller = grant.caller(request.caller.address)
            request.record.key = grant.key.name
        try:
            self.require(grant, token, needed).take_request()
        except (UnauthorizedError, ForbiddenError) as error:
            refusals = self._refused_strangers if grant is None else self._refused_keys
            refusals.log(
                _classify_refusal(error, token, grant),
                method,
                path,
                key=request.record.key,
                address=request.caller.address,
                **request.log_fields,
            )
            raise


def _classify_refusal(error: NormserveError, token: bytes | None, grant: KeyringEntry | None) -> str:
    if grant is None:
        return "absent" if token is None else "unknown"
    return "forbidden" if isinstance(error, ForbiddenError) else "expired"
