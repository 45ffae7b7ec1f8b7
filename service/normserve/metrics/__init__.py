"""Metrics: instruments, the server's metrics, and their Prometheus text."""
