"""Export of spans to a collector by OTLP over HTTP, whether it is available or not."""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Attributes, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from normserve import __version__
from normserve.traces.request_tracer import RequestTracer

log = logging.getLogger(__name__)

# Timeout of the export of one batch, with retries; spans that end during it wait, up to the processor's 2048.
_EXPORT_S = 5.0
_PATH = "/v1/traces"
_SCOPE = "normserve"

OnDropped = Callable[[str, int], None]
"""A callback with the reason for dropped spans, one of `metrics.SPANS_DROPPED`, and their number; one thread for
each reason.
"""


def make_exporting_tracer(
    endpoint: str, ratio: float, on_dropped: OnDropped, process: str | None = None
) -> RequestTracer:
    """Make a tracer that exports spans over OTLP/HTTP to the collector at `endpoint`.

    The environment variables of the OpenTelemetry SDK also apply: headers of its requests, certificates, the
    service's name and attributes.

    Args:
        endpoint: a URL; without a path, OTLP's own is added.
        ratio: share of requests that are traced of those whose parent is not sampled.
        on_dropped: called for spans that the collector does not get.
        process: this process's name in a fleet.
    """
    exporter = _MonitoredExporter(
        OTLPSpanExporter(complete_endpoint(endpoint), timeout=_EXPORT_S), endpoint, on_dropped
    )
    provider = TracerProvider(ALWAYS_ON, _make_resource(process), shutdown_on_exit=False)
    processor = _DropCountingProcessor(exporter, on_dropped)
    provider.add_span_processor(processor)
    scope = InstrumentationScope(_SCOPE, __version__)

    def make_stage(parent: SpanContext, name: str, began_ns: int, ended_ns: int) -> None:
        # The result of `Tracer.start_span` and `Span.end`, in a tenth of their time.
        span_id = provider.id_generator.generate_span_id()
        context = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                provider.resource,
                instrumentation_scope=scope,
                start_time=began_ns,
                end_time=ended_ns,
            )
        )

    def shut_down(within_s: float) -> None:
        # It may wait for a collector that hangs: the server does not wait for it.
        thread = threading.Thread(target=provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(within_s)

    return RequestTracer(provider.get_tracer(_SCOPE, __version__), make_stage, ratio, shut_down)


def complete_endpoint(endpoint: str) -> str:
    """Return a collector's URL with OTLP's path /v1/traces, unless the URL has a path already."""
    has_path = urlsplit(endpoint).path not in ("", "/")
    return endpoint if has_path else endpoint.rstrip("/") + _PATH


def _make_resource(process: str | None) -> Resource:
    """Make the OpenTelemetry resource with this process's service name, version and ids.  Environment
    variables of OpenTelemetry override them.
    """
    own: dict[str, str | int] = {
        "service.name": "normserve",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
        "process.pid": os.getpid(),
    }
    if process is not None:
        own["normserve.process"] = process
    # The environment has precedence: operators name services there.
    merged = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
    return _HashedResource(merged.attributes, merged.schema_url)


class _HashedResource(Resource):
    """An OpenTelemetry resource that computes its hash only once, because the exporter needs it for each span."""

    def __init__(self, attributes: Attributes, schema_url: str | None) -> None:
        super().__init__(attributes, schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class _DropCountingProcessor(BatchSpanProcessor):
    """A batch span processor that also counts spans dropped because its queue is full, by calling `on_dropped`."""

    def __init__(self, exporter: "_MonitoredExporter", on_dropped: OnDropped) -> None:
        self._exporter_monitor = exporter
        self._on_dropped = on_dropped
        self._ended_count = self._dropped_count = 0
        self._max_queue_size: int = self._default_max_queue_size()  # type: ignore[no-untyped-call]
        super().__init__(exporter, max_queue_size=self._max_queue_size)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span for export.  If the queue is full, the oldest span is dropped, and this is
        reported.
        """
        self._ended_count += 1
        if self._ended_count - self._dropped_count - self._exporter_monitor.received_count > self._max_queue_size:
            # The added span replaces the oldest one.
            self._dropped_count += 1
            self._on_dropped("queue_full", 1)
        super().on_end(span)


class _MonitoredExporter(SpanExporter):
    """A span exporter that passes spans to another exporter, reports lost spans, and logs when failures
    begin and end.

    Attributes:
        received_count: spans that it was given so far.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str, on_dropped: OnDropped) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._on_dropped = on_dropped
        self._lost_count = 0
        self.received_count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans by the wrapped exporter; if that fails, report them as dropped and log the first failure."""
        self.received_count += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost_count:
                log.warning("%s accepts no traces: they are dropped until it does", self._endpoint)
            self._lost_count += len(spans)
            self._on_dropped("export_failed", len(spans))
        elif self._lost_count:
            log.info("%s accepts traces again: %d spans were dropped", self._endpoint, self._lost_count)
            self._lost_count = 0
        return result

    def shutdown(self) -> None:
        """Shut down the wrapped exporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter; return whether it succeeded."""
        return self._exporter.force_flush(timeout_millis)
