"""The transport for other ASGI servers, over `receive` and `send`.

It copies each byte once more in each direction, and the server below it reads bodies before they are admitted.
It is for deployments in which another program chooses the server.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from normserve.errors import ClientLeftError
from normserve.http.transport.reception import IncomingBody, parse_content_length
from normserve.http.transport.sending import Buffers, Headers, ResponseSender


class AsgiAdapter:
    """Wraps the application's entrance for a server that calls it with a plain scope."""

    def __init__(self, entrance: ASGIApp) -> None:
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._entrance(scope, receive, send)
            return
        body, response = _AsgiBody(scope, receive), AsgiResponseSender(send)
        state = {**scope.get("state", {}), "reception": body.reception, "sending": response}
        # The application takes a scope without a client for a connection of our own Unix socket.
        client = scope.get("client") or ("", 0)
        try:
            await self._entrance({**scope, "state": state, "client": client}, body.receive, response.send)
        finally:
            body.stop()


class _AsgiBody:
    """One request's body: passed to its reception once a route requests it there, else as ASGI messages."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._pump: asyncio.Task[None] | None = None
        self.reception = IncomingBody(parse_content_length(scope["headers"]), self._begin)
        if self.reception.announced == 0:
            self.reception.complete()

    async def receive(self) -> Message:
        """The next message, in ASGI's form."""
        self.stop()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.reception.complete()
        return message

    def stop(self) -> None:
        """Read no more of the body."""
        if self._pump is not None:
            self._pump.cancel()

    def _begin(self) -> bytearray:
        if not self.reception.is_complete:
            self._pump = asyncio.get_running_loop().create_task(self._fill())
        return bytearray()

    async def _fill(self) -> None:
        reception = self.reception
        while reception.is_filling and not reception.is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                reception.fail(ClientLeftError("the client left while its body was received"))
                return
            # The reception may have failed meanwhile.
            if reception.is_filling and (piece := message.get("body", b"")):
                reception.append(piece)
            if not message.get("more_body", False):
                reception.complete()


class AsgiResponseSender(ResponseSender):
    """One response, sent through a server that does not report whether the client received it.

    `on_departure` is never called: such a server cancels the call of a client that has left.
    """

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    async def respond(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for buffer in buffers:
            await self.send({"type": "http.response.body", "body": buffer, "more_body": True})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, message: Message) -> None:
        """Forward a message, with its body as `bytes`, which ASGI requires: a server may pickle it."""
        if message["type"] == "http.response.start":
            self._began = time.perf_counter()
        if isinstance(message.get("body"), memoryview):
            message = {**message, "body": bytes(message["body"])}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = time.perf_counter()
            self.is_delivered = True
