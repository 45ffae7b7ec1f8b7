"""One relayed request, in the process that owns the device."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Scope

from normserve.errors import ClientLeftError, NormserveError
from normserve.http.relay import messages
from normserve.http.relay.exchange import FrontEndConnection, RelayedIncomingBody, RelayedResponseSender


class RelayedRequest:
    """A request that the application answers, as any other."""

    def __init__(
        self, front_end: FrontEndConnection, request: messages.RequestStarted, scope: Scope, entrance: ASGIApp
    ) -> None:
        """Args: scope: but for what the connection says."""
        self._front_end = front_end
        self._number = request.number
        self._asgi_app = entrance
        self._incoming_body = RelayedIncomingBody(front_end, request)
        self._response_sender = RelayedResponseSender(front_end, request.number)
        state = {"reception": self._incoming_body, "sending": self._response_sender}
        whole = {**scope, "client": request.client, "state": state}
        self._is_application_done = False
        self._task = asyncio.get_running_loop().create_task(self._run_application(whole))

    def abort_body(self, error: NormserveError, received: int) -> None:
        """The body has been cut off, before the application knows of it, after so many bytes."""
        self._incoming_body.received_bytes = received
        if isinstance(error, ClientLeftError):
            self._response_sender.handle_disconnect()
        self._incoming_body.abort(error)

    def on_progress(self, nbytes: int) -> None:
        """So many bytes of the body have come to their place."""
        self._incoming_body.on_progress(nbytes)

    def on_message(self, message: Any) -> None:
        """What the front end says about it."""
        match message:
            case messages.ResponseSent():
                self._response_sender.on_response_sent(message)
            case messages.BodyReceived():
                self._incoming_body.on_body_received(message)
            case messages.BodyPart():
                self._incoming_body.on_body_part(message)
            case messages.BodyAborted():
                self._incoming_body.on_body_aborted(left=message.left)
            case messages.ClientDisconnected():
                self._incoming_body.handle_disconnect()
                self._response_sender.handle_disconnect()
        self._end_if_finished()

    def on_front_end_lost(self) -> None:
        """The front end is gone, and its clients with it."""
        self._incoming_body.on_body_aborted(left=True)
        self._response_sender.on_front_end_lost()

    async def _run_application(self, scope: Scope) -> None:
        try:
            await self._asgi_app(scope, self._incoming_body.receive_message, self._response_sender.send_message)
        finally:
            if not self._response_sender.is_response_complete:
                self._front_end.send_message(messages.ResponseAborted(self._number))
            self._is_application_done = True
            self._end_if_finished()

    def _end_if_finished(self) -> None:
        """It ends once it is answered and its body's memory is written to no more."""
        if self._is_application_done and not self._incoming_body.is_memory_shared:
            self._front_end.end_request(self._number)
