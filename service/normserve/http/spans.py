"""The span of an HTTP request, with the attributes of OpenTelemetry's semantic conventions."""

from typing import TYPE_CHECKING

from starlette.types import Scope

from normserve.requests.lifecycle import RequestLifecycle

if TYPE_CHECKING:
    # It imports OpenTelemetry, which is installed only where traces are used.
    from normserve.traces.request_tracer import Attributes

UNMATCHED = "(unmatched)"
"""The route of a request that no route handles."""

_LONGEST_PATH = 200


def describe_request_span(request: RequestLifecycle, scope: Scope, route: str) -> "tuple[str, Attributes]":
    """Return the name and the attributes of a request's span.

    Args: route: the path's template.
    """
    method = scope["method"]
    attributes: Attributes = {
        "http.request.method": method,
        "http.response.status_code": request.record.status,
        "http.request.body.size": request.record.received_bytes,
        "http.response.body.size": request.record.sent_bytes,
        "url.path": scope["path"][:_LONGEST_PATH],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "client.address": request.client_identity.address,
        "normserve.request_id": request.request_id,
    }
    if agent := request.headers.get(b"user-agent"):
        attributes["user_agent.original"] = agent.decode("latin-1")[:_LONGEST_PATH]
    if (server := scope.get("server")) is not None:
        attributes["server.address"] = str(server[0])
        if server[1] is not None:
            attributes["server.port"] = server[1]
    if route == UNMATCHED:
        return method, attributes
    attributes["http.route"] = route
    return f"{method} {route}", attributes
