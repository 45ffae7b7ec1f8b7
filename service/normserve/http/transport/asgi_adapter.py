"""The transport for other ASGI servers, over `receive` and `send`.

It copies each byte once more in each direction, and the server below it reads bodies before they are admitted.
It is for deployments in which another program chooses the server.
"""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.errors import ClientLeftError
from normserve.http.transport.incoming_body import IncomingBody, find_body_length
from normserve.http.transport.response_sender import Buffers, Headers, ResponseSender


class AsgiAdapter:
    """Adapts the application to ASGI servers that cannot receive bodies directly into slabs.

    It adds the objects to the request's scope that receive the body and send the response.
    """

    def __init__(self, entrance: ASGIApp) -> None:
        self._asgi_app = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._asgi_app(scope, receive, send)
            return
        body, response = _AsgiBody(scope, receive), AsgiResponseSender(send)
        state = {**scope.get("state", {}), "reception": body.incoming_body, "sending": response}
        # The application takes a scope without a client for a connection of our own Unix socket.
        client = scope.get("client") or ("", 0)
        headers = [each for each in scope["headers"] if each[0] != GATEWAY_CALLER]
        try:
            own = {"state": state, "client": client, "headers": headers}
            await self._asgi_app({**scope, **own}, body.receive_message, response.forward_message)
        finally:
            body.stop_receiving()


class _AsgiBody:
    """One request's body, which an ASGI server receives.

    A handler reads it either with `IncomingBody.receive_into`, or as ASGI messages.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._receive_task: asyncio.Task[None] | None = None
        self.incoming_body = IncomingBody(find_body_length(scope["headers"]), self._start_and_take_early_bytes)
        if self.incoming_body.content_length == 0:
            self.incoming_body.mark_complete()

    async def receive_message(self) -> Message:
        """Return the server's next ASGI message to a handler that reads the body itself.

        First stop passing the body to the `IncomingBody`.  The body's last message marks the `IncomingBody`
        as complete.
        """
        self.stop_receiving()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.incoming_body.mark_complete()
        return message

    def stop_receiving(self) -> None:
        """Stop passing the body to the `IncomingBody`."""
        if self._receive_task is not None:
            self._receive_task.cancel()

    def _start_and_take_early_bytes(self) -> bytearray:
        if not self.incoming_body.is_complete:
            self._receive_task = asyncio.get_running_loop().create_task(self._receive_all())
        return bytearray()

    async def _receive_all(self) -> None:
        """Pass all pieces of the body to the `IncomingBody`; abort it if the client disconnects."""
        reception = self.incoming_body
        while reception.is_receiving and not reception.is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                reception.abort(ClientLeftError("the client left while its body was received"))
                return
            # The reception may have been aborted meanwhile.
            if reception.is_receiving and (piece := message.get("body", b"")):
                reception.append_part(piece)
            if not message.get("more_body", False):
                reception.mark_complete()


class AsgiResponseSender(ResponseSender):
    """One response, sent through a server that does not report whether the client received it.

    `on_disconnect` is never called: such a server cancels the call of a disconnected client.
    """

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    async def send_response(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        """Send a complete response as ASGI messages, one for each buffer."""
        await self.forward_message({"type": "http.response.start", "status": status, "headers": list(headers)})
        for buffer in buffers:
            await self.forward_message({"type": "http.response.body", "body": buffer, "more_body": True})
        await self.forward_message({"type": "http.response.body", "body": b"", "more_body": False})

    async def forward_message(self, message: Message) -> None:
        """Forward an ASGI message of the response, and record when the response begins and ends.

        A body is converted to `bytes`, which ASGI requires: a server may pickle the message.
        """
        if message["type"] == "http.response.start":
            self._began_at = time.perf_counter()
        if isinstance(message.get("body"), memoryview):
            message = {**message, "body": bytes(message["body"])}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended_at = time.perf_counter()
            self.is_delivered = True
