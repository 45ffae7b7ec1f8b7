"""Receiving a request's body into a slab, within its permit."""

import asyncio

from starlette.requests import Request

from normserve.errors import ClientLeftError, OverloadedError, RequestTimeoutError, TooLargeError
from normserve.exchange import Exchange
from normserve.limits import Limits
from normserve.slabs import Slab


class BodyReader:
    """Admits requests and receives their bodies."""

    def __init__(self, limits: Limits, *, max_body_bytes: int, timeout_s: float) -> None:
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def read(self, request: Request) -> memoryview:
        """Take a permit and receive the whole body.

        Raises:
            TooLargeError: it is longer than bodies may be; an announced one is refused unread.
            OverloadedError: there is no permit or no memory for it.
            RequestTimeoutError: the client paused for too long.
            ClientLeftError: the client went away.
        """
        exchange: Exchange = request.state.exchange
        announced = self._announced(request)
        exchange.permit = self._limits.acquire(announced or 0)
        # Memory that is never written is never taken, so an unannounced body may have a slab for the longest.
        view = _slab(self._max_body_bytes if announced is None else announced).view
        received = 0
        while True:
            chunk, more = await self._chunk(request)
            end = received + len(chunk)
            if end > len(view):
                raise TooLargeError(f"a body must be at most {self._max_body_bytes} bytes, more came")
            if announced is None:
                exchange.permit.grow(len(chunk))
            view[received:end] = chunk
            exchange.record.received = received = end
            if not more:
                return view[:received]

    def _announced(self, request: Request) -> int | None:
        text = request.headers.get("content-length")
        if text is None:
            return None if "transfer-encoding" in request.headers else 0
        if int(text) > self._max_body_bytes:
            raise TooLargeError(f"a body must be at most {self._max_body_bytes} bytes, {text[:20]} are announced")
        return int(text)

    async def _chunk(self, request: Request) -> tuple[bytes, bool]:
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeoutError(f"no more of the body came for {self._timeout_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left while its body was received")
        return message.get("body", b""), message.get("more_body", False)


def _slab(nbytes: int) -> Slab:
    try:
        return Slab(nbytes)
    except MemoryError:
        raise OverloadedError(f"there is no memory for a body of {nbytes} bytes now") from None
