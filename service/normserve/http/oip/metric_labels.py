"""The labels under which requests of `/v2` are counted."""

from fastapi import Request

from normserve.http.http_exchange import HttpExchange
from normserve.metrics.request_metrics import GRPC_TRANSPORT, RequestRecord

_TRANSPORT = "oip"


def label_transport(record: RequestRecord) -> None:
    """Set the label `transport` of a record to this protocol, unless the request was one of gRPC."""
    if record.transport != GRPC_TRANSPORT:
        record.transport = _TRANSPORT


def label_request(request: Request, route: str) -> HttpExchange:
    """Set a request's metric labels to this route and to this protocol; return the request's exchange."""
    exchange: HttpExchange = request.scope["state"]["exchange"]
    exchange.record.op = route
    label_transport(exchange.record)
    return exchange
