"""One request over HTTP and its response, from the first header to the last byte."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.types import Scope

from normserve.admission.callers import Caller
from normserve.http.spans import describe_span
from normserve.http.transport import Buffers, Departure, Headers, Reception
from normserve.metrics.requests import RequestRecord
from normserve.requests.lifecycle import RequestLifecycle, RequestServices

if TYPE_CHECKING:
    from normserve.traces.traces import Attributes


class Exchange(RequestLifecycle):
    """The data of a request that the routes and the edge of the application share.

    Attributes:
        scope: the request as ASGI has it.
        path: the request's path, without the application's root path.
        reception: receives the request's body.
        sending: sends the response.
        respond: sends a whole response: status, headers, the body in pieces, and its length in bytes.
        client_left: the connection ended before the response was complete.
    """

    respond: Callable[[int, Headers, Buffers, int], Awaitable[None]]
    client_left = False
    _is_in_work = False

    def __init__(
        self,
        services: RequestServices,
        request_id: str,
        headers: Mapping[bytes, bytes],
        caller: Caller,
        record: RequestRecord,
        scope: Scope,
        find_route: Callable[[Scope], str],
    ) -> None:
        """Args: find_route: returns the template of a request's path."""
        super().__init__(services, request_id, headers, caller, record)
        self.scope = scope
        path: str = scope["path"]
        self.path = path.removeprefix(below) if (below := scope.get("root_path")) else path
        self.reception: Reception = scope["state"]["reception"]
        self.sending: Departure = scope["state"]["sending"]
        self._find_route = find_route

    def begin_work(self) -> None:
        """The request has been received completely: from now on the server is responsible for a response."""
        self._is_in_work = True
        self.services.progress.begin()

    def end_work(self) -> None:
        """The response is ready, or no longer wanted; a second call does nothing."""
        if self._is_in_work:
            self._is_in_work = False
            self.services.progress.end()

    def describe_span(self) -> "tuple[str, Attributes]":
        return describe_span(self, self.scope, self._find_route(self.scope))

    def describe_target(self) -> tuple[str, str]:
        return self.scope["method"], self._find_route(self.scope)
