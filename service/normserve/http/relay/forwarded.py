"""A request that a front end relays, on the side of its connection."""

import asyncio
import functools
from collections import deque
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from normserve.errors import ClientLeftError, NormserveError, NotReadyError
from normserve.http.edge.middleware import choose_request_id
from normserve.http.relay import messages
from normserve.http.relay.link import RelayLink
from normserve.http.transport import IncomingBody
from normserve.http.transport.sending import SocketResponseSender

# The other process limits how long a body may take.
_NO_LIMIT_S = 7 * 86400.0


class OwnerConnection(Protocol):
    """The process that a request is relayed to.

    Attributes:
        memory: its, that is mapped here, by its number.
        receiving: bodies that come to their places, by their requests.
    """

    link: RelayLink
    memory: dict[int, memoryview]
    receiving: dict[int, IncomingBody]

    def watch(self, number: int, reception: IncomingBody) -> None:
        """Report how much of a slow body has come."""


def decline_message(link: RelayLink, message: Any) -> None:
    """Answer messages about a request that no longer has a handler."""
    match message:
        case messages.OperationResponse() | messages.CompleteResponse() | messages.ResponsePart():
            link.send(messages.ResponseSent(message.number, 0.0, is_delivered=False))
        case messages.BodyLocation() | messages.BodyPartRequest():
            link.send(messages.BodyAborted(message.number, left=True))


class ForwardedRequest:
    """One request, from the side of its connection."""

    def __init__(self, owner: OwnerConnection, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._owner = owner
        self._number = number
        self._scope = scope
        self._receive, self._send = receive, send
        self._request_id = choose_request_id(dict(scope["headers"]))
        self._reception: IncomingBody = scope["state"]["reception"]
        self._sending: SocketResponseSender = scope["state"]["sending"]
        # Whether the response has, and whether all of it is with the connection.
        self._has_begun = self._is_complete = False
        self._is_receiving = self._is_stopped = False
        self._pulling: asyncio.Future[Any] | None = None
        # What was said and has not been done; None says that nothing more will be.
        self._said: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    async def run(self) -> bool:
        """Relay it; False where it must be answered here, since the other process is gone."""
        link, sending = self._owner.link, self._sending
        if link.is_behind and not await self._is_taken():
            return True
        sending.on_departure = self._tell_departure
        link.send(await self._request())
        message = None
        try:
            while not self._is_complete and (message := await self._next()) is not None:
                await self._do(message)
        except BaseException:
            self._tell_departure()
            for each in (message, *self._said):
                decline_message(link, each)
            raise
        finally:
            sending.on_departure = None
        if not self._is_complete and self._has_begun:
            await sending.cut_off()
        return self._has_begun

    async def _is_taken(self) -> bool:
        """Wait until the other process has read earlier messages; False where the client left first."""
        if self._sending.is_delivered is not None:
            return False
        left = asyncio.get_running_loop().create_future()
        self._sending.on_departure = functools.partial(left.set_result, None)
        drained = asyncio.ensure_future(self._owner.link.drained())
        try:
            await asyncio.wait((left, drained), return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            self._sending.on_departure = None
        return not left.done()

    def on_message(self, message: Any) -> None:
        """What the other process says about it; None once that is gone."""
        if message is None or type(message) is messages.BodyStopRequest:
            self._stop()
        if type(message) is not messages.BodyStopRequest:
            self._said.append(message)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    async def _request(self) -> messages.RequestStarted:
        scope, reception = self._scope, self._reception
        head = messages.RequestHead(
            method=scope["method"],
            path=scope["path"],
            raw_path=scope["raw_path"],
            query=scope["query_string"],
            headers=scope["headers"],
            http_version=scope["http_version"],
            scheme=scope["scheme"],
            server=scope["server"],
        )
        body = None
        if reception.is_complete and reception.announced:
            body = bytearray(await reception.into(_refuse_allocation, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S))
        return messages.RequestStarted(
            self._number,
            messages.encode(head),
            scope["client"],
            reception.announced,
            body,
            reception.began,
            self._request_id,
        )

    async def _next(self) -> Any:
        if not self._said:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._said.popleft()

    async def _do(self, message: Any) -> None:
        match message:
            case messages.OperationResponse():
                await self._respond(message.response(self._request_id))
            case messages.CompleteResponse():
                await self._respond(message)
            case messages.ResponsePart():
                await self._pass_on(message)
            case messages.BodyLocation():
                await self._receive_into(message)
            case messages.BodyPartRequest():
                await self._pull(all_of_it=message.all)
            case messages.ResponseAborted():
                self._has_begun = self._is_complete = True
                await self._sending.cut_off()

    async def _respond(self, message: messages.CompleteResponse) -> None:
        self._has_begun = True
        memory = self._owner.memory
        body = [
            memory[each.memory][each.offset : each.offset + each.nbytes]
            if isinstance(each, messages.SharedSlabRange)
            else each
            for each in message.body
        ]
        await self._sending.respond(message.status, message.headers, body, message.nbytes)
        self._tell_sent(is_last=True)

    async def _pass_on(self, message: messages.ResponsePart) -> None:
        self._has_begun = True
        if message.status:
            start = {"type": "http.response.start", "status": message.status, "headers": message.headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": message.data, "more_body": message.more})
        self._tell_sent(is_last=not message.more)

    async def _receive_into(self, message: messages.BodyLocation) -> None:
        room = self._owner.memory[message.memory][message.offset : message.offset + message.nbytes]
        reception, link = self._reception, self._owner.link
        was_complete = reception.is_complete
        self._is_receiving, self._is_stopped = True, False
        self._owner.watch(self._number, reception)
        try:
            body = await reception.into(lambda nbytes: room, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S)
        except NormserveError as error:
            left = isinstance(error, ClientLeftError) and not self._is_stopped
            link.send(messages.BodyProgress({self._number: reception.received}))
            link.send(messages.BodyAborted(self._number, left))
            return
        except asyncio.CancelledError:
            link.send(messages.BodyAborted(self._number, left=True))
            raise
        finally:
            self._is_receiving = False
            self._owner.receiving.pop(self._number, None)
        if was_complete:
            # It came meanwhile, to where it was not asked for yet.
            room[: len(body)] = body
        link.send(messages.BodyReceived(self._number, len(body), reception.began + reception.seconds))

    async def _pull(self, *, all_of_it: bool) -> None:
        self._is_stopped = False
        more = True
        while more and not self._is_stopped:
            self._pulling = asyncio.ensure_future(self._receive())
            try:
                message = await self._pulling
            except asyncio.CancelledError:
                if self._is_stopped:
                    return
                self._pulling.cancel()
                raise
            finally:
                self._pulling = None
            if message["type"] == "http.disconnect":
                self._owner.link.send(messages.BodyAborted(self._number, left=True))
                return
            more = message.get("more_body", False)
            self._owner.link.send(messages.BodyPart(self._number, message.get("body", b""), more))
            await self._owner.link.drained()
            more = more and all_of_it

    def _stop(self) -> None:
        """No more of the body is wanted."""
        self._is_stopped = True
        if self._is_receiving:
            self._reception.fail(NotReadyError("no more of the body is wanted"))
        elif self._pulling is not None:
            self._pulling.cancel()

    def _tell_sent(self, *, is_last: bool) -> None:
        self._is_complete = is_last
        is_delivered = is_last and bool(self._sending.is_delivered)
        self._owner.link.send(messages.ResponseSent(self._number, self._sending.seconds, is_delivered))

    def _tell_departure(self) -> None:
        self._owner.link.send(messages.ClientDisconnected(self._number))


def _refuse_allocation(nbytes: int) -> memoryview:
    raise AssertionError("a body that is there needs no memory")
