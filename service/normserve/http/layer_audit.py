"""Changes of registered layers as the audit trail tells of them."""

from starlette.types import Scope

from normserve.http.exchange import Exchange
from normserve.logs import audit

LAYERS = "layers"
"""The `op` of a request to a route of layers, as its record has it."""

_CHANGING = ("PUT", "DELETE")
_RESULTS = {200: "replaced", 201: "registered", 204: "removed"}


def note_layer_change(scope: Scope, exchange: Exchange) -> None:
    """Tell of a request that asked to change a layer, once it is known what became of that."""
    if scope["method"] not in _CHANGING:
        return
    record = exchange.record
    audit.layer_changed(
        scope["method"],
        scope["path"],
        record.error or _RESULTS.get(record.status, "interrupted"),
        key=exchange.caller.key,
        address=exchange.caller.address,
        request_id=exchange.request_id,
    )
