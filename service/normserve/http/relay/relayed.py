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
        self._entrance = entrance
        self._reception = RelayedIncomingBody(front_end, request)
        self._departure = RelayedResponseSender(front_end, request.number)
        state = {"reception": self._reception, "sending": self._departure}
        whole = {**scope, "client": request.client, "state": state}
        self._is_over = False
        self._task = asyncio.get_running_loop().create_task(self._answer(whole))

    def fail(self, error: NormserveError, received: int) -> None:
        """The body has been cut off, before the application knows of it, after so many bytes."""
        self._reception.received = received
        if isinstance(error, ClientLeftError):
            self._departure.on_left()
        self._reception.fail(error)

    def on_progress(self, nbytes: int) -> None:
        """So many bytes of the body have come to their place."""
        self._reception.on_progress(nbytes)

    def on_message(self, message: Any) -> None:
        """What the front end says about it."""
        match message:
            case messages.ResponseSent():
                self._departure.on_sent(message)
            case messages.BodyReceived():
                self._reception.on_received(message)
            case messages.BodyPart():
                self._reception.on_piece(message)
            case messages.BodyAborted():
                self._reception.on_ended(left=message.left)
            case messages.ClientDisconnected():
                self._reception.on_left()
                self._departure.on_left()
        self._settle()

    def on_lost(self) -> None:
        """The front end is gone, and its clients with it."""
        self._reception.on_ended(left=True)
        self._departure.on_front_end_lost()

    async def _answer(self, scope: Scope) -> None:
        try:
            await self._entrance(scope, self._reception.receive, self._departure.send)
        finally:
            if not self._departure.is_answered:
                self._front_end.send(messages.ResponseAborted(self._number))
            self._is_over = True
            self._settle()

    def _settle(self) -> None:
        """It ends once it is answered and its body's memory is written to no more."""
        if self._is_over and not self._reception.is_lent:
            self._front_end.end(self._number)
