"""W3C Trace Context of the caller's current OpenTelemetry span, which requests carry to the server.

OpenTelemetry is never imported here: unless the program has done so, no span can be current.
"""

import sys
from typing import Any

#: The module that manages spans; until it is loaded there are none.
TRACING = "opentelemetry.trace"


def get_current_headers() -> list[tuple[str, str]]:
    """Return the `traceparent` and, if not empty, `tracestate` headers of the current span; [] without a span."""
    context = _get_current_span_context()
    if context is None:
        return []
    headers = [("traceparent", _format_traceparent(context))]
    if state := context.trace_state.to_header():
        headers.append(("tracestate", state))
    return headers


def get_current_traceparent() -> str | None:
    """Return the value of the header `traceparent`; None where no valid span is current."""
    context = _get_current_span_context()
    return None if context is None else _format_traceparent(context)


def _get_current_span_context() -> Any:
    """Return the context of the caller's current OpenTelemetry span.

    None if no valid span is current, or the program has not loaded OpenTelemetry.
    """
    trace = sys.modules.get(TRACING)
    # Another thread may be importing the module, which lacks its functions until then.
    get_current_span = None if trace is None else getattr(trace, "get_current_span", None)
    if get_current_span is None:
        return None
    context = get_current_span().get_span_context()
    return context if context.is_valid else None


def _format_traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
