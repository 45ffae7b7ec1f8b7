"""KServe's inference protocol over gRPC: a gateway, in a process of its own, that is an HTTP client of the server.

It knows the server by its `/v2` alone.  Keys, scopes, limits, regions of shared memory, metrics and logs are the
server's; the gateway bounds only the messages that it holds itself.
"""
