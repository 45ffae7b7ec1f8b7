"""HTTP/1.1 between a socket and the application: bodies are received into slabs, responses are sent from views.

`listen` creates uvicorn's `http` argument, a factory of `HttpConnection`.  The ASGI state of a request has
objects for the transfer of its body and of its response, as `reception` and `sending`; `AsgiAdapter` provides them
under other servers.
"""

from normserve.http.transport.asgi import AsgiAdapter
from normserve.http.transport.connection import HttpConnection, make_connection_factory
from normserve.http.transport.draining import DiscardLimits
from normserve.http.transport.exchanges import ConnectionPolicy
from normserve.http.transport.patience import ConnectionTimeouts
from normserve.http.transport.reception import IncomingBody
from normserve.http.transport.sending import Buffers, Headers, ResponseSender

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
