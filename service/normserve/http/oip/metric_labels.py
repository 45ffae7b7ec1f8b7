"""The labels under which requests of `/v2` are counted."""

from fastapi import Request

from normserve.http.http_exchange import HttpExchange

TRANSPORT = "oip"


def label_request(request: Request, route: str) -> HttpExchange:
    """Set a request's metric labels to this route and to this protocol; return the request's exchange."""
    exchange: HttpExchange = request.scope["state"]["exchange"]
    exchange.record.op, exchange.record.transport = route, TRANSPORT
    return exchange
