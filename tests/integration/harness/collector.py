"""A collector of OpenTelemetry traces that keeps what it is sent, and one that misbehaves."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: Options of a server that sends spans soon.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}


class Span:
    """One span that came.

    Attributes:
        links: trace and span ids of other spans that it names.
        began, ended: nanoseconds since 1970.
    """

    def __init__(self, message: Any, resource: Any) -> None:
        self.name: str = message.name
        self.kind: int = message.kind
        self.trace_id, self.span_id = message.trace_id.hex(), message.span_id.hex()
        self.parent_id: str = message.parent_span_id.hex()
        self.state: str = message.trace_state
        self.is_failed = message.status.code == message.status.STATUS_CODE_ERROR
        self.began, self.ended = message.start_time_unix_nano, message.end_time_unix_nano
        self.attributes = _values(message.attributes)
        self.resource = _values(resource.attributes)
        self.links = {(link.trace_id.hex(), link.span_id.hex()) for link in message.links}


class Collector:
    """Listens on a free port.

    Attributes:
        status: what it answers with.
        paths: where it was posted to.
    """

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self._spans: list[Span] = []
        self._lets_go = threading.Event()
        self._lets_go.set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        """Those that have come."""
        return list(self._spans)

    def named(self, name: str) -> list[Span]:
        """Those of a name."""
        return [span for span in self.spans if span.name == name]

    def of_request(self, request_id: str) -> Span | None:
        """The span of the request with that id."""
        found = [span for span in self.spans if span.attributes.get("normserve.request_id") == request_id]
        return found[0] if found else None

    def children(self, span: Span) -> list[Span]:
        """Those whose parent is this one, in the order in which they began."""
        return sorted((each for each in self.spans if each.parent_id == span.span_id), key=lambda each: each.began)

    def hang(self) -> None:
        """Answer nobody from now on."""
        self._lets_go.clear()

    def resume(self) -> None:
        """Answer again, those who wait first."""
        self._lets_go.set()

    def stop(self) -> None:
        self._lets_go.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                collector._lets_go.wait()
                if collector.status == 200:
                    collector._keep(content)
                with contextlib.suppress(ConnectionError):
                    self.send_response(collector.status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Tests have enough to read."""

        return Handler

    def _keep(self, content: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            for of_scope in of_resource.scope_spans:
                self._spans += [Span(message, of_resource.resource) for message in of_scope.spans]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that is stopped in the end."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.stop()


def _values(attributes: Any) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
