"""The access log: one line for each completed request, with the logger `normserve.access`."""

from starlette.types import Scope

from normserve.http.exchange import Exchange
from normserve.http.routes.scopes import RouteScopes
from normserve.requests.access_log import log_request


class AccessLog:
    """Writes the access log."""

    def __init__(self, scopes: RouteScopes) -> None:
        self._scopes = scopes

    def note(self, scope: Scope, exchange: Exchange) -> None:
        """Log a request that has ended, with its route's template, because clients can send any path."""
        path = self._scopes.template(scope)
        log_request(scope["method"], path, exchange.record, exchange.caller, exchange.log_fields)
