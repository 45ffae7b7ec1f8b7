"""The labels under which requests of `/v2` are counted."""

from fastapi import Request

from normserve.http.exchange import Exchange

TRANSPORT = "oip"


def note(request: Request, route: str) -> Exchange:
    """Count a request as one of that route, and of this protocol."""
    exchange: Exchange = request.scope["state"]["exchange"]
    exchange.record.op, exchange.record.transport = route, TRANSPORT
    return exchange
