"""Logging to stderr: the format of lines, and audit events."""
