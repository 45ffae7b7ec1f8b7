"""Metrics: instruments, the metrics made of them, and their Prometheus text."""
