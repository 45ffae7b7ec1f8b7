"""The access log: one line for each completed request, with the logger `normserve.access`."""

import logging

from starlette.types import Scope

from normserve.http.exchange import Exchange
from normserve.http.routes.scopes import RouteScopes

_log = logging.getLogger("normserve.access")


class AccessLog:
    """Writes the access log."""

    def __init__(self, scopes: RouteScopes) -> None:
        self._scopes = scopes

    def note(self, scope: Scope, exchange: Exchange) -> None:
        """Log a request that has ended, with its route's template, because clients can send any path."""
        record = exchange.record
        fields = {
            "method": scope["method"],
            "path": self._scopes.template(scope),
            "status": record.status,
            "key": exchange.caller.key or "-",
            "address": exchange.caller.address,
            "received_bytes": record.received,
            "sent_bytes": record.sent,
            "ms": round(record.seconds * 1000, 3),
            **exchange.log_fields,
        }
        _log.info("request", extra={"fields": fields})
