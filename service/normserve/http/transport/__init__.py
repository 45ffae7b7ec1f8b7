"""HTTP/1.1 between a socket and the application: bodies are received into slabs, responses are sent from views.

`listen` creates uvicorn's `http` argument, a factory of `Connection`.  The ASGI state of a request has objects for
the transfer of its body and of its response, as `reception` and `sending`; `PlainAsgi` provides them under other
servers.
"""

from normserve.http.transport.asgi import PlainAsgi
from normserve.http.transport.connection import Connection, listen
from normserve.http.transport.draining import DrainLimits
from normserve.http.transport.exchanges import Manners
from normserve.http.transport.patience import Patience
from normserve.http.transport.reception import Reception
from normserve.http.transport.sending import Buffers, Departure, Headers

__all__ = [
    "Buffers",
    "Connection",
    "Departure",
    "DrainLimits",
    "Headers",
    "Manners",
    "Patience",
    "PlainAsgi",
    "Reception",
    "listen",
]
