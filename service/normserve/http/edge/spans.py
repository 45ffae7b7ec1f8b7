"""Spans of HTTP requests, with the attributes of OpenTelemetry's semantic conventions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Scope

from normserve.http.routes.scopes import UNMATCHED, RouteScopes
from normserve.metrics.requests import RequestRecord

if TYPE_CHECKING:
    # It imports OpenTelemetry, which is installed only where traces are used.
    from normserve.traces.traces import Attributes, Traces

_LONGEST_PATH = 200


class HttpSpans:
    """Makes spans of HTTP requests."""

    def __init__(self, traces: "Traces", scopes: RouteScopes) -> None:
        self._traces = traces
        self._scopes = scopes

    def decide(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> None:
        """Decide whether a request is traced, before its end."""
        self._traces.decide(record, headers)

    def end(
        self, record: RequestRecord, headers: Mapping[bytes, bytes], scope: Scope, request_id: str, address: str
    ) -> None:
        """End a request's span, if it is traced; before it is observed.

        Args: address: the client's.
        """
        if self._traces.passes_over(record, headers):
            return

        def describe() -> "tuple[str, Attributes]":
            return describe_span(record, headers, scope, self._scopes.template(scope), request_id, address)

        self._traces.end(record, headers, describe)


def describe_span(
    record: RequestRecord,
    headers: Mapping[bytes, bytes],
    scope: Scope,
    route: str,
    request_id: str,
    address: str,
) -> "tuple[str, Attributes]":
    """Return the name and the attributes of a request's span.

    Args:
        route: the path's template.
        address: the client's.
    """
    method = scope["method"]
    attributes: Attributes = {
        "http.request.method": method,
        "http.response.status_code": record.status,
        "http.request.body.size": record.received,
        "http.response.body.size": record.sent,
        "url.path": scope["path"][:_LONGEST_PATH],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "client.address": address,
        "normserve.request_id": request_id,
    }
    if agent := headers.get(b"user-agent"):
        attributes["user_agent.original"] = agent.decode("latin-1")[:_LONGEST_PATH]
    if (server := scope.get("server")) is not None:
        attributes["server.address"] = str(server[0])
        if server[1] is not None:
            attributes["server.port"] = server[1]
    if route == UNMATCHED:
        return method, attributes
    attributes["http.route"] = route
    return f"{method} {route}", attributes
