"""Whether the extra `otel`, which the export needs, is installed."""

import importlib.util

_NEEDED = "opentelemetry.exporter.otlp.proto.http"


def is_otel_installed() -> bool:
    """Return whether the OpenTelemetry packages that the export of traces needs are installed."""
    try:
        return importlib.util.find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        return False
