"""Counting: instruments, the metrics that are made of them, and the text that Prometheus reads."""
