"""Audit events for changes of registered layers."""

from starlette.types import Scope

from normserve.http.http_exchange import HttpExchange
from normserve.logs import audit

LAYERS = "layers"
"""The `op` in the record of a request to a route of layers."""

# Results by method and status: PUT registers, DELETE removes, POST unloads (`/v2`).
_RESULTS = {
    "PUT": {200: "replaced", 201: "registered"},
    "DELETE": {204: "removed"},
    "POST": {200: "removed"},
}


def audit_layer_change(scope: Scope, exchange: HttpExchange) -> None:
    """Log a request to change a layer, once its result is known."""
    results = _RESULTS.get(scope["method"])
    if results is None:
        return
    record = exchange.record
    audit.log_layer_change(
        scope["method"],
        scope["path"],
        record.error_code or results.get(record.status, "interrupted"),
        key=exchange.client_identity.key,
        address=exchange.client_identity.address,
        **exchange.log_fields,
    )
