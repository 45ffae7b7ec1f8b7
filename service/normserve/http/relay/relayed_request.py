"""One relayed request, in the process that owns the device."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Scope

from normserve.errors import ClientLeftError, NormserveError
from normserve.http.relay import relay_messages
from normserve.http.relay.exchange import FrontEndConnection, RelayedIncomingBody, RelayedResponseSender


class RelayedRequest:
    """A relayed request that the application answers like any other request."""

    def __init__(
        self, front_end: FrontEndConnection, request: relay_messages.RequestStarted, scope: Scope, entrance: ASGIApp
    ) -> None:
        """Args: scope: the ASGI scope without the data of the connection."""
        self._front_end = front_end
        self._number = request.number
        self._asgi_app = entrance
        self._incoming_body = RelayedIncomingBody(front_end, request)
        self._response_sender = RelayedResponseSender(front_end, request.number)
        state = {"reception": self._incoming_body, "sending": self._response_sender}
        full_scope = {**scope, "client": request.client, "state": state}
        self._is_application_done = False
        self._task = asyncio.get_running_loop().create_task(self._run_application(full_scope))

    def abort_body(self, error: NormserveError, received: int) -> None:
        """Abort the body after `received` bytes, before the application begins."""
        self._incoming_body.received_bytes = received
        if isinstance(error, ClientLeftError):
            self._response_sender.handle_disconnect()
        self._incoming_body.abort(error)

    def on_progress(self, nbytes: int) -> None:
        """Record that the body's first `nbytes` are in its slab."""
        self._incoming_body.on_progress(nbytes)

    def on_message(self, message: Any) -> None:
        """Handle a message of the front end about this request."""
        match message:
            case relay_messages.ResponseSent():
                self._response_sender.on_response_sent(message)
            case relay_messages.BodyReceived():
                self._incoming_body.on_body_received(message)
            case relay_messages.BodyPart():
                self._incoming_body.on_body_part(message)
            case relay_messages.BodyAborted():
                self._incoming_body.on_body_aborted(is_client_disconnected=message.is_client_disconnected)
            case relay_messages.ClientDisconnected():
                self._incoming_body.handle_disconnect()
                self._response_sender.handle_disconnect()
        self._end_if_finished()

    def on_front_end_lost(self) -> None:
        """Abort the request: its front end, and with it the client's connection, has ended."""
        self._incoming_body.on_body_aborted(is_client_disconnected=True)
        self._response_sender.on_front_end_lost()

    async def _run_application(self, scope: Scope) -> None:
        try:
            await self._asgi_app(scope, self._incoming_body.receive_message, self._response_sender.send_message)
        finally:
            if not self._response_sender.is_response_complete:
                self._front_end.send_message(relay_messages.ResponseAborted(self._number))
            self._is_application_done = True
            self._end_if_finished()

    def _end_if_finished(self) -> None:
        """End the request once it is answered and the front end no longer writes to the body's slab."""
        if self._is_application_done and not self._incoming_body.is_memory_shared:
            self._front_end.end_request(self._number)
