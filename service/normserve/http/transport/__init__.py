"""HTTP/1.1 between a socket and the application: bodies arrive in slabs, responses leave as views.

`listen` makes uvicorn's `http` argument: a factory of `Connection`.  What a request's body and response did on
the wire lies in the request's ASGI state, as `reception` and `sending`; `PlainAsgi` puts the like there under any
other server.
"""

from normserve.http.transport.asgi import PlainAsgi
from normserve.http.transport.connection import Connection, listen
from normserve.http.transport.exchanges import Manners
from normserve.http.transport.patience import Patience
from normserve.http.transport.reception import Reception
from normserve.http.transport.sending import Buffers, Departure, Headers

__all__ = [
    "Buffers",
    "Connection",
    "Departure",
    "Headers",
    "Manners",
    "Patience",
    "PlainAsgi",
    "Reception",
    "listen",
]
