"""One request and its response, with all records about them from the first header to the last byte."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from normserve.admission.callers import Caller
from normserve.admission.permits import Permit
from normserve.engine.progress import Progress
from normserve.http.transport import Buffers, Departure, Headers, Reception
from normserve.metrics.requests import RequestRecord
from normserve.traces.parent import log_fields


@dataclass(slots=True)
class Exchange:
    """The data of a request that the routes and the edge of the application share.

    Attributes:
        request_id: the client's own, if it sent a valid one.
        path: the request's path, without the application's root path.
        headers: the request's headers by lower-case name; the last one of repeated headers.
        caller: the client.
        record: the values for the metrics.
        reception: receives the request's body.
        sending: sends the response.
        respond: sends a whole response: status, headers, the body in pieces, and its length in bytes.
        permit: set once the request is admitted; the edge releases it.
        client_left: the connection ended before the response was complete.
        progress: counts requests on which work has begun and not ended.
    """

    request_id: str
    path: str
    headers: Mapping[bytes, bytes]
    caller: Caller
    record: RequestRecord
    reception: Reception
    sending: Departure
    respond: Callable[[int, Headers, Buffers, int], Awaitable[None]] = field(init=False)
    permit: Permit | None = None
    client_left: bool = False
    progress: Progress | None = None
    _is_in_work: bool = False

    @property
    def log_fields(self) -> dict[str, str]:
        """The log fields that identify the request."""
        return log_fields(self.request_id, self.record.trace_id, self.headers)

    def begin_work(self) -> None:
        """The request has been received completely: from now on the server is responsible for a response."""
        if self.progress is not None:
            self._is_in_work = True
            self.progress.begin()

    def end_work(self) -> None:
        """The response is ready, or no longer wanted; a second call does nothing."""
        if self._is_in_work:
            self._is_in_work = False
            assert self.progress is not None
            self.progress.end()
