"""Calls to a server on the same host, which shares memory with the client (docs/local-protocol.md)."""
