"""A request that a front end relays, in the process that has the client's connection."""

import asyncio
import functools
from collections import deque
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from normserve.errors import ClientLeftError, NormserveError, NotReadyError
from normserve.http.middleware.middleware import choose_request_id
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_link import RelayLink
from normserve.http.transport import IncomingBody
from normserve.http.transport.sending import SocketResponseSender

# The other process limits how long a body may take.
_NO_LIMIT_S = 7 * 86400.0


class OwnerConnection(Protocol):
    """The connection to the process that a request is relayed to.

    Attributes:
        mapped_memory: slabs of that process that are mapped in this one, by slab number.
        receiving_bodies: bodies that are being received into slabs, by request number.
    """

    link: RelayLink
    mapped_memory: dict[int, memoryview]
    receiving_bodies: dict[int, IncomingBody]

    def start_progress_reports(self, number: int, reception: IncomingBody) -> None:
        """Report the number of received bytes of a body regularly, if it is slow."""


def decline_message(link: RelayLink, message: Any) -> None:
    """Answer messages about a request that no longer has a handler."""
    match message:
        case relay_messages.OperationResponse() | relay_messages.CompleteResponse() | relay_messages.ResponsePart():
            link.send_message(relay_messages.ResponseSent(message.number, 0.0, is_delivered=False))
        case relay_messages.BodyIntoSlabRequest() | relay_messages.BodyPartRequest():
            link.send_message(relay_messages.BodyAborted(message.number, is_client_disconnected=True))


class ForwardedRequest:
    """One request and its response, in the process that has the client's connection."""

    def __init__(self, owner: OwnerConnection, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._owner = owner
        self._number = number
        self._scope = scope
        self._receive, self._send = receive, send
        self._request_id = choose_request_id(dict(scope["headers"]))
        self._incoming_body: IncomingBody = scope["state"]["reception"]
        self._response_sender: SocketResponseSender = scope["state"]["sending"]
        # Whether the response has started, and whether the connection has all of it.
        self._has_response_started = self._is_response_complete = False
        self._is_body_receiving = self._is_body_cancelled = False
        self._part_task: asyncio.Future[Any] | None = None
        # Messages that have not been handled; None means that no more will be received.
        self._messages: deque[Any] = deque()
        self._message_arrival: asyncio.Future[None] | None = None

    async def relay(self) -> bool:
        """Relay the request; return False if the other process ended before it began a response."""
        link, sending = self._owner.link, self._response_sender
        if link.is_backlogged and not await self._wait_link_writable():
            return True
        sending.on_disconnect = self._report_disconnect
        link.send_message(await self._make_request())
        message = None
        try:
            while not self._is_response_complete and (message := await self._wait_message()) is not None:
                await self._handle_message(message)
        except BaseException:
            self._report_disconnect()
            for each in (message, *self._messages):
                decline_message(link, each)
            raise
        finally:
            sending.on_disconnect = None
        if not self._is_response_complete and self._has_response_started:
            await sending.abort_connection()
        return self._has_response_started

    async def _wait_link_writable(self) -> bool:
        """Wait until the kernel has taken earlier messages; return False if the client disconnected first."""
        if self._response_sender.is_delivered is not None:
            return False
        disconnected = asyncio.get_running_loop().create_future()
        self._response_sender.on_disconnect = functools.partial(disconnected.set_result, None)
        drained = asyncio.ensure_future(self._owner.link.wait_flushed())
        try:
            await asyncio.wait((disconnected, drained), return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            self._response_sender.on_disconnect = None
        return not disconnected.done()

    def on_message(self, message: Any) -> None:
        """Handle a message of the other process about this request; None means that the process has ended."""
        if message is None or type(message) is relay_messages.BodyStopRequest:
            self._cancel_body()
        if type(message) is not relay_messages.BodyStopRequest:
            self._messages.append(message)
            if self._message_arrival is not None and not self._message_arrival.done():
                self._message_arrival.set_result(None)

    async def _make_request(self) -> relay_messages.RequestStarted:
        scope, reception = self._scope, self._incoming_body
        head = relay_messages.RequestHead(
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
        if reception.is_complete and reception.content_length:
            body = bytearray(
                await reception.receive_into(_refuse_allocation, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S)
            )
        return relay_messages.RequestStarted(
            self._number,
            relay_messages.encode(head),
            scope["client"],
            reception.content_length,
            body,
            reception.began_at,
            self._request_id,
        )

    async def _wait_message(self) -> Any:
        if not self._messages:
            self._message_arrival = asyncio.get_running_loop().create_future()
            await self._message_arrival
        return self._messages.popleft()

    async def _handle_message(self, message: Any) -> None:
        match message:
            case relay_messages.OperationResponse():
                await self._send_response(message.make_response(self._request_id))
            case relay_messages.CompleteResponse():
                await self._send_response(message)
            case relay_messages.ResponsePart():
                await self._send_part(message)
            case relay_messages.BodyIntoSlabRequest():
                await self._receive_body(message)
            case relay_messages.BodyPartRequest():
                await self._receive_parts(all_of_it=message.all)
            case relay_messages.ResponseAborted():
                self._has_response_started = self._is_response_complete = True
                await self._response_sender.abort_connection()

    async def _send_response(self, message: relay_messages.CompleteResponse) -> None:
        self._has_response_started = True
        memory = self._owner.mapped_memory
        body = [
            memory[each.memory][each.offset : each.offset + each.nbytes]
            if isinstance(each, relay_messages.SharedSlabRange)
            else each
            for each in message.body
        ]
        await self._response_sender.send_response(message.status, message.headers, body, message.nbytes)
        self._report_sent(is_last=True)

    async def _send_part(self, message: relay_messages.ResponsePart) -> None:
        self._has_response_started = True
        if message.status:
            start = {"type": "http.response.start", "status": message.status, "headers": message.headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": message.data, "more_body": message.more})
        self._report_sent(is_last=not message.more)

    async def _receive_body(self, message: relay_messages.BodyIntoSlabRequest) -> None:
        room = self._owner.mapped_memory[message.memory][message.offset : message.offset + message.nbytes]
        reception, link = self._incoming_body, self._owner.link
        was_complete = reception.is_complete
        self._is_body_receiving, self._is_body_cancelled = True, False
        self._owner.start_progress_reports(self._number, reception)
        try:
            body = await reception.receive_into(lambda nbytes: room, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S)
        except NormserveError as error:
            is_client_disconnected = isinstance(error, ClientLeftError) and not self._is_body_cancelled
            link.send_message(relay_messages.BodyProgress({self._number: reception.received_bytes}))
            link.send_message(relay_messages.BodyAborted(self._number, is_client_disconnected))
            return
        except asyncio.CancelledError:
            link.send_message(relay_messages.BodyAborted(self._number, is_client_disconnected=True))
            raise
        finally:
            self._is_body_receiving = False
            self._owner.receiving_bodies.pop(self._number, None)
        if was_complete:
            # The body was received before its slab was assigned, into another buffer.
            room[: len(body)] = body
        link.send_message(
            relay_messages.BodyReceived(self._number, len(body), reception.began_at + reception.receive_s)
        )

    async def _receive_parts(self, *, all_of_it: bool) -> None:
        self._is_body_cancelled = False
        more = True
        while more and not self._is_body_cancelled:
            self._part_task = asyncio.ensure_future(self._receive())
            try:
                message = await self._part_task
            except asyncio.CancelledError:
                if self._is_body_cancelled:
                    return
                self._part_task.cancel()
                raise
            finally:
                self._part_task = None
            if message["type"] == "http.disconnect":
                self._owner.link.send_message(relay_messages.BodyAborted(self._number, is_client_disconnected=True))
                return
            more = message.get("more_body", False)
            self._owner.link.send_message(relay_messages.BodyPart(self._number, message.get("body", b""), more))
            await self._owner.link.wait_flushed()
            more = more and all_of_it

    def _cancel_body(self) -> None:
        """Stop the reception of the body."""
        self._is_body_cancelled = True
        if self._is_body_receiving:
            self._incoming_body.abort(NotReadyError("no more of the body is wanted"))
        elif self._part_task is not None:
            self._part_task.cancel()

    def _report_sent(self, *, is_last: bool) -> None:
        self._is_response_complete = is_last
        is_delivered = is_last and bool(self._response_sender.is_delivered)
        self._owner.link.send_message(
            relay_messages.ResponseSent(self._number, self._response_sender.send_s, is_delivered)
        )

    def _report_disconnect(self) -> None:
        self._owner.link.send_message(relay_messages.ClientDisconnected(self._number))


def _refuse_allocation(nbytes: int) -> memoryview:
    raise AssertionError("a body that is there needs no memory")
