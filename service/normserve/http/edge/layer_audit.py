"""Audit events for changes of registered layers."""

from starlette.types import Scope

from normserve.http.exchange import Exchange
from normserve.logs import audit

LAYERS = "layers"
"""The `op` of a request to a route of layers, as its record has it."""

# By method: to register, to remove, and to unload as `/v2` calls that.
_RESULTS = {
    "PUT": {200: "replaced", 201: "registered"},
    "DELETE": {204: "removed"},
    "POST": {200: "removed"},
}


def note_layer_change(scope: Scope, exchange: Exchange) -> None:
    """Tell of a request that asked to change a layer, once it is known what became of that."""
    results = _RESULTS.get(scope["method"])
    if results is None:
        return
    record = exchange.record
    audit.layer_changed(
        scope["method"],
        scope["path"],
        record.error or results.get(record.status, "interrupted"),
        key=exchange.caller.key,
        address=exchange.caller.address,
        **exchange.log_fields,
    )
