"""Traces with OpenTelemetry: a span for each sampled request, its stages, and the launches that requests share."""
