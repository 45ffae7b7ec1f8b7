"""The labels under which requests of `/v2` are counted."""

from fastapi import Request

from normserve.http.exchange import Exchange

TRANSPORT = "oip"


def note(request: Request, route: str) -> Exchange:
    """Set the request's metric labels to this route and protocol."""
    exchange: Exchange = request.scope["state"]["exchange"]
    exchange.record.op, exchange.record.transport = route, TRANSPORT
    return exchange
