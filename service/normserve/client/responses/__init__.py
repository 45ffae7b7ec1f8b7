"""Responses of a server, which are validated before use."""
