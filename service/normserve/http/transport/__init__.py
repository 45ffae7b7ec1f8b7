"""HTTP/1.1 between a socket and the application: bodies are received into slabs, responses are sent from views.

`make_connection_factory` makes uvicorn's `http` argument, a factory of `HttpConnection`.  The ASGI state of a
request has objects for the transfer of its body and of its response, as `reception` and `sending`; `AsgiAdapter`
provides them under other servers.
"""

from normserve.http.transport.asgi_adapter import AsgiAdapter
from normserve.http.transport.body_discard import DiscardLimits
from normserve.http.transport.connection_timeouts import ConnectionTimeouts
from normserve.http.transport.exchange_protocol import ConnectionPolicy
from normserve.http.transport.http_connection import HttpConnection, make_connection_factory
from normserve.http.transport.incoming_body import IncomingBody
from normserve.http.transport.response_sender import Buffers, Headers, ResponseSender

__all__ = [
    "AsgiAdapter",
    "Buffers",
    "ConnectionPolicy",
    "ConnectionTimeouts",
    "DiscardLimits",
    "Headers",
    "HttpConnection",
    "IncomingBody",
    "ResponseSender",
    "make_connection_factory",
]
