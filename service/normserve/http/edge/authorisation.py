"""Decides by API key and route whether a request is allowed."""

import time

from starlette.types import Scope

from normserve.admission.keys import Grant, Keyring
from normserve.errors import ForbiddenError, NormserveError, UnauthorizedError
from normserve.http.exchange import Exchange
from normserve.http.routes.scopes import PUBLIC, Needed, RouteScopes
from normserve.logs.audit import Refusals


class Authorisation:
    """Admits requests, if keys are required."""

    def __init__(self, keys: Keyring, scopes: RouteScopes) -> None:
        self._keys = keys
        self._scopes = scopes
        # Separate, so that guessed keys do not crowd out log lines about known keys.
        self._refused_strangers, self._refused_keys = Refusals(), Refusals()

    def admit(self, scope: Scope, token: bytes | None, exchange: Exchange) -> None:
        """Admit a request, and write its caller into its exchange.

        Args:
            token: the request's key, None if it has none.

        Raises:
            UnauthorizedError: the request needs a key, and its key is missing, unknown or expired.
            ForbiddenError: its key does not allow this.
            RateLimitedError: its key sent more requests per second than it may.
        """
        needed = self._scopes.needed(scope)
        if needed == PUBLIC:
            return
        grant = None if token is None else self._keys.find(token)
        if grant is not None:
            exchange.caller = grant.caller(exchange.caller.address)
            exchange.record.key = grant.key.name
        try:
            _require(token, grant, needed).take_request()
        except (UnauthorizedError, ForbiddenError) as error:
            refusals = self._refused_strangers if grant is None else self._refused_keys
            refusals.log(
                _reason(error, token, grant),
                scope["method"],
                scope["path"],
                key=exchange.caller.key,
                address=exchange.caller.address,
                **exchange.log_fields,
            )
            raise


def _require(token: bytes | None, grant: Grant | None, needed: Needed | None) -> Grant:
    """Return the grant if it allows the request."""
    if token is None:
        raise UnauthorizedError("an API key must be given as Authorization: Bearer KEY")
    if grant is None:
        raise UnauthorizedError("the API key is not one that the server knows")
    if needed is None:
        grant.require_valid(time.time())
        raise ForbiddenError("no API key may use this path")
    grant.require_scope(needed, time.time())
    return grant


def _reason(error: NormserveError, token: bytes | None, grant: Grant | None) -> str:
    if token is None:
        return "absent"
    if grant is None:
        return "unknown"
    return "forbidden" if isinstance(error, ForbiddenError) else "expired"
