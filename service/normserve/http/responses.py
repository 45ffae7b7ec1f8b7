"""Responses that consist of several buffers, which are sent without joining them."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from normserve.http.http_exchange import HttpExchange
from normserve.http.transport import Buffers, Headers


def make_response_headers(nbytes: int, media_type: bytes, headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response of `nbytes`, without those that every response has."""
    return [(b"content-type", media_type), (b"content-length", b"%d" % nbytes), *headers]


class BuffersResponse(Response):
    """A response whose body is in several buffers, which are sent without being joined.

    The call returns when the operating system has taken all bytes.  It does not use ASGI messages, so the
    request's body must have been received.
    """

    def __init__(self, buffers: Buffers, media_type: bytes, headers: Headers) -> None:
        self.status_code = 200
        self.background = None
        self._buffers = buffers
        self._nbytes = sum(map(len, buffers))
        self.raw_headers = make_response_headers(self._nbytes, media_type, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: HttpExchange = scope["state"]["exchange"]
        buffers, self._buffers = self._buffers, ()
        await exchange.send_response(self.status_code, self.raw_headers, buffers, self._nbytes)
