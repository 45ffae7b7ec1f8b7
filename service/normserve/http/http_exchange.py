"""A request over HTTP and its response, from the first header to the last byte, and the request's span.

The span has the attributes of OpenTelemetry's semantic conventions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.types import Scope

from normserve.admission.client_identity import ClientIdentity
from normserve.errors import NormserveError
from normserve.http.transport import Buffers, Headers, IncomingBody, ResponseSender
from normserve.jobs.job import NormJob, NormResult
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.request_lifecycle import RequestLifecycle, RequestServices

if TYPE_CHECKING:
    # It imports OpenTelemetry, which is installed only where traces are used.
    from normserve.traces.request_tracer import Attributes

NO_ROUTE = "(unmatched)"
"""The route of a request that no route handles."""

_LONGEST_PATH = 200


class HttpExchange(RequestLifecycle):
    """One HTTP request and its response, used by the route's handler and by the middleware.

    The handler awaits the result of a job.  The middleware sends the errors that the handler raises.

    Attributes:
        scope: the request's ASGI scope.
        path: the request's path, without the application's root path.
        incoming_body: receives the request's body.
        response_sender: sends the response.
        send_response: sends a complete response: status, headers, the body in pieces, and its length in
            bytes.
        is_client_disconnected: the connection ended before the response was complete.
    """

    send_response: Callable[[int, Headers, Buffers, int], Awaitable[None]]
    is_client_disconnected = False
    _result: asyncio.Future[NormResult] | None = None

    def __init__(
        self,
        services: RequestServices,
        request_id: str,
        headers: Mapping[bytes, bytes],
        caller: ClientIdentity,
        record: RequestRecord,
        scope: Scope,
        find_route: Callable[[Scope], str],
    ) -> None:
        """Args: find_route: returns the template of a request's path."""
        super().__init__(services, request_id, headers, caller, record)
        self.scope = scope
        path: str = scope["path"]
        self.path = path.removeprefix(below) if (below := scope.get("root_path")) else path
        self.incoming_body: IncomingBody = scope["state"]["reception"]
        self.response_sender: ResponseSender = scope["state"]["sending"]
        self._find_route_template = find_route

    async def await_result(self) -> NormResult:
        """Wait for the result of the submitted job; cancel the job if the client disconnects before it runs.

        Raises:
            NormserveError: the deadline passes, the client disconnects, or the device reports an error.
        """
        self._result = asyncio.get_running_loop().create_future()
        # A running job is awaited: the permit is held as long as the device works.
        self.response_sender.on_disconnect = self.cancel_job
        try:
            return await self._result
        except asyncio.CancelledError:
            self.cancel_job()
            raise
        finally:
            self.response_sender.on_disconnect = None

    def conclude_job(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        """Pass the job's result or error to the handler that waits in `await_result`."""
        # Dropped: the traceback of an error holds the frame that waits, and so this object and the job's slabs.
        result, self._result = self._result, None
        assert result is not None
        if result.done():
            return
        if isinstance(ended, NormserveError):
            result.set_exception(ended)
        else:
            result.set_result(ended)

    def describe_span(self) -> "tuple[str, Attributes]":
        return describe_request_span(self, self.scope, self._find_route_template(self.scope))

    def describe_log_target(self) -> tuple[str, str]:
        return self.scope["method"], self._find_route_template(self.scope)


def describe_request_span(request: RequestLifecycle, scope: Scope, route: str) -> "tuple[str, Attributes]":
    """Return the name and the attributes of a request's trace span.

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
    if route == NO_ROUTE:
        return method, attributes
    attributes["http.route"] = route
    return f"{method} {route}", attributes
