"""The server for clients on the same host: memory is shared, and only references are sent over a Unix socket.

docs/local-protocol.md specifies the protocol; adr/0022 explains why clients divide the arena themselves.
"""
