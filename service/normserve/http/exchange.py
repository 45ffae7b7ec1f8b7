"""One request and its response, with everything recorded about them from the first header to the last byte."""

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
    """What the routes and the edge of the application share about a request.

    Attributes:
        request_id: the client's own, if it sent a sane one.
        path: the request's, below where the application lies.
        headers: the request's by lower-case name; of one that came twice, the last.
        caller: who sent it.
        record: what the metrics will be told.
        reception: the request's body on the wire.
        sending: the response on the wire.
        respond: sends a whole response: status, headers, the body in pieces, their bytes.
        permit: once the request is admitted; the edge gives it back.
        client_left: the connection went before the response was complete.
        progress: is told when work on the request begins and ends.
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
        """What names the request in a line of the log."""
        return log_fields(self.request_id, self.record.trace_id, self.headers)

    def begin_work(self) -> None:
        """The request has been received whole: whether it is answered is up to the server now."""
        if self.progress is not None:
            self._is_in_work = True
            self.progress.begin()

    def end_work(self) -> None:
        """The answer is there, or is no longer wanted; a second call does nothing."""
        if self._is_in_work:
            self._is_in_work = False
            assert self.progress is not None
            self.progress.end()
