"""Clients on the same host: memory is shared, and only references travel over a Unix socket.

docs/local-protocol.md is the protocol, adr/0022 why the arena is the client's to divide.
"""
