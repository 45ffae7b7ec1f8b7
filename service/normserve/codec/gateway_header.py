"""The header by which the gateway of gRPC names the caller to the server."""

GATEWAY_CALLER = b"normserve-grpc-caller"
"""The name of the header, in lower case.

Its value is the caller's address.  The server accepts it on a Unix socket from its own user, and drops it from any
other request.
"""
