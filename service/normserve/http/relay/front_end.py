"""The front end's ASGI application, which relays every request to a process that owns a device.

The clients' connections are in the front end's process.
"""

import asyncio
import functools
import itertools
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from normserve.engine.busy_polling import BusyPoller, make_busy_poller
from normserve.errors import ClientLeftError, NormserveError, NotReadyError
from normserve.errors.problems import get_status
from normserve.http.middleware.request_middleware import choose_request_id
from normserve.http.problem_responses import make_problem_response
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_link import RelayLink
from normserve.http.transport import IncomingBody
from normserve.http.transport.response_sender import SocketResponseSender
from normserve.memory.host_segments import map_segment

# The other process limits how long a body may take.
_NO_LIMIT_S = 7 * 86400.0

# Interval between reports of the received bytes of slow bodies to the process that owns the device.
_PROGRESS_S = 0.02
# An owner that has sent no readiness message for this long gets no requests if another owner is ready.
_QUIET_S = 3.0


class RelayApplication:
    """The ASGI application of a front end: relays requests in turn to owners, the processes with a device.

    Only owners that accept work get requests, if there are any.

    Attributes:
        on_link_lost: called when a link that was in use has ended, though its process may still run.
    """

    def __init__(self, index: int) -> None:
        """Args: index: this front end's index among all front ends."""
        self._index = index
        self.on_link_lost: Callable[[], None] = lambda: None
        self._owners: list[_OwnerSession] = []
        self._turn_counter = itertools.count()
        self._unreported_refusals: Counter[tuple[int, str]] = Counter()
        self._unreported_disconnects = 0
        self._connection_count = 0
        # No other thread of this process has work.
        self._busy_poller = make_busy_poller()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._choose_next_owner()
        if owner is None or not await owner.relay_request(scope, receive, send):
            await self._refuse_request(scope, send)

    @property
    def is_busy(self) -> bool:
        """Whether requests are in progress."""
        return any(owner.is_busy for owner in self._owners)

    def connect_owner(self, connected: socket.socket) -> None:
        """Begin to relay requests to a process that owns a device, over a connected socket."""
        owner = _OwnerSession(connected, self._busy_poller)
        owner.on_lost = functools.partial(self._remove_owner, owner)
        owner.link.send_message(relay_messages.FrontEndHello(self._index, os.getpid()))
        owner.link.on_flushed = self._report_counts_to_first_owner
        self._owners.append(owner)
        self._report_counts_to_first_owner()

    def _remove_owner(self, owner: "_OwnerSession") -> None:
        """Remove a process whose link has ended; from then on another process gets the counts for the metrics."""
        self._owners.remove(owner)
        # From now on, the counts go to another owner.
        self._report_counts_to_first_owner()
        # The owner ends a second link with the same process before it sends any message.
        if owner.has_sent_message:
            self.on_link_lost()

    def count_refusal(self, error: NormserveError) -> None:
        """Count an error response to input that was not relayed to the other process."""
        self._unreported_refusals[get_status(error), error.code] += 1
        self._report_counts_to_first_owner()

    def count_unread_response_disconnect(self) -> None:
        """Count a client that disconnected without reading its response."""
        self._unreported_disconnects += 1
        self._report_counts_to_first_owner()

    def adjust_connection_count(self, change: int) -> None:
        """Add `change` to the number of open connections."""
        self._connection_count += change
        self._report_counts_to_first_owner()

    async def _refuse_request(self, scope: Scope, send: Send) -> None:
        """Answer a request with an error, because no process with a device is connected, or the chosen one has
        ended.

        The response is the same for all requests, and needs no check of host or key.  The next owner counts it.
        """
        error = NotReadyError("the process that owns the device is starting again")
        self.count_refusal(error)
        request_id = choose_request_id(dict(scope["headers"]))
        status, headers, body = make_problem_response(error, request_id, scope["path"])
        headers.append((b"x-request-id", request_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _report_counts_to_first_owner(self) -> None:
        """Send the numbers of connections, refusals and unread responses to one process that owns a device, for its
        metrics.

        If messages to that owner are still unsent, the counts are sent after them.
        """
        if not self._owners or self._owners[0].link.is_backlogged:
            return
        owner = self._owners[0]
        if owner.reported_connections != self._connection_count:
            owner.reported_connections = self._connection_count
            owner.link.send_message(relay_messages.ConnectionCount(self._connection_count))
        for (status, code), count in self._unreported_refusals.items():
            owner.link.send_message(relay_messages.RefusalCount(status, code, count))
        self._unreported_refusals.clear()
        if self._unreported_disconnects:
            owner.link.send_message(relay_messages.UnreadResponseCount(self._unreported_disconnects))
        self._unreported_disconnects = 0

    def _choose_next_owner(self) -> "_OwnerSession | None":
        """Choose, in turn, the process that gets the next request, among those that accept work; None if none is
        connected.

        If none accepts work, return one that does not: it refuses the request with a reason.
        """
        owners = self._owners
        if len(owners) > 1:
            owners = [each for each in owners if each.is_ready] or owners
        return owners[next(self._turn_counter) % len(owners)] if owners else None


class _OwnerSession:
    """The link to one process that owns a device, and the requests that are relayed to it.

    Attributes:
        link: carries messages to the process and from it.
        mapped_memory: slabs of that process that are mapped in this one, by slab number.
        receiving_bodies: bodies that are being received into slabs, by request number.
        on_lost: called when the link has ended.
        reported_connections: the number of connected clients that was last sent to the process.
    """

    def __init__(self, connected: socket.socket, polling: BusyPoller | None) -> None:
        self.reported_connections = 0
        self._is_reported_ready = False
        self._last_message_at = 0.0
        self.on_lost: Callable[[], None] = lambda: None
        self.mapped_memory: dict[int, memoryview] = {}
        self.receiving_bodies: dict[int, IncomingBody] = {}
        self._requests: dict[int, _ForwardedRequest] = {}
        self._request_numbers = itertools.count()
        self._progress_timer: asyncio.TimerHandle | None = None
        self._reported_bytes: dict[int, int] = {}
        self.link = RelayLink(
            connected, relay_messages.from_owner, self._on_message, self._on_link_end, polling=polling
        )

    @property
    def has_sent_message(self) -> bool:
        """Whether the process has sent a message."""
        return self._last_message_at > 0

    @property
    def is_ready(self) -> bool:
        """Whether the process accepts work and has reported so recently."""
        return self._is_reported_ready and time.monotonic() - self._last_message_at < _QUIET_S

    async def relay_request(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Relay a request; return False if the process that owns the device ended before it began a response."""
        number = next(self._request_numbers)
        relayed = self._requests[number] = _ForwardedRequest(self, number, scope, receive, send)
        try:
            return await relayed.try_relay()
        finally:
            del self._requests[number]

    @property
    def is_busy(self) -> bool:
        """Whether requests are in progress."""
        return bool(self._requests)

    def start_progress_reports(self, number: int, reception: IncomingBody) -> None:
        """Begin to report every 20 ms how many bytes of a body have been received, until the body is complete."""
        self.receiving_bodies[number] = reception
        if self._progress_timer is None:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _report_progress(self) -> None:
        """Report the received bytes of each body for which the number has changed; schedule the next report."""
        self._progress_timer = None
        received = {number: each.received_bytes for number, each in self.receiving_bodies.items()}
        news = {number: nbytes for number, nbytes in received.items() if self._reported_bytes.get(number) != nbytes}
        self._reported_bytes = received
        if news:
            self.link.send_message(relay_messages.BodyProgress(news))
        if received:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _on_message(self, message: Any) -> None:
        """Handle a message of the device's process about its readiness, shared slabs or one request."""
        match message:
            case relay_messages.OwnerReadiness():
                self._is_reported_ready, self._last_message_at = message.is_ready, time.monotonic()
            case relay_messages.SharedSlabAdded():
                descriptor = self.link.pop_descriptor()
                try:
                    self.mapped_memory[message.number] = memoryview(map_segment(descriptor, is_populated=False))
                except (ValueError, MemoryError):
                    # Requests with bytes in this slab could never be answered; without the link they end now.
                    self.link.close()
                finally:
                    os.close(descriptor)
            case relay_messages.SharedSlabRemoved():
                for number in message.numbers:
                    self.mapped_memory.pop(number, None)
            case _:
                if (relayed := self._requests.get(message.number)) is not None:
                    relayed.handle_or_enqueue_message(message)
                else:
                    _decline_message(self.link, message)

    def _on_link_end(self) -> None:
        self.on_lost()
        for relayed in self._requests.values():
            relayed.handle_or_enqueue_message(None)


class _ForwardedRequest:
    """One client's request that the front end relays to an owner, and the owner's response."""

    def __init__(self, owner: _OwnerSession, number: int, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def try_relay(self) -> bool:
        """Relay the request to the owner, and send the owner's response to the client.

        Return False if the owner ended before it began a response, so that the caller must answer.  Return
        True in all other cases, also if the client has disconnected.
        """
        link, sending = self._owner.link, self._response_sender
        if link.is_backlogged and not await self._wait_link_writable():
            return True
        sending.on_disconnect = self._report_disconnect
        link.send_message(await self._make_request())
        message = None
        try:
            while not self._is_response_complete and (message := await self._wait_message_or_end()) is not None:
                await self._handle_message(message)
        except BaseException:
            self._report_disconnect()
            for each in (message, *self._messages):
                _decline_message(link, each)
            raise
        finally:
            sending.on_disconnect = None
        if not self._is_response_complete and self._has_response_started:
            await sending.abort_connection()
        return self._has_response_started

    async def _wait_link_writable(self) -> bool:
        """Wait until the operating system has taken all earlier messages to the process that owns the device.

        Return False if the client disconnected first.
        """
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

    def handle_or_enqueue_message(self, message: Any) -> None:
        """Queue a message about this request for `try_relay`, or act on it at once.

        None means that the owner has ended.  A request to stop the reception of the body takes effect at
        once, and is not queued.
        """
        if message is None or type(message) is relay_messages.BodyStopRequest:
            self._cancel_body()
        if type(message) is not relay_messages.BodyStopRequest:
            self._messages.append(message)
            if self._message_arrival is not None and not self._message_arrival.done():
                self._message_arrival.set_result(None)

    async def _make_request(self) -> relay_messages.RequestStarted:
        """Make the message that relays the request; it includes a body that has been received completely."""
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

    async def _wait_message_or_end(self) -> Any:
        """Wait for the next message about this request; return None if the device's process has ended."""
        if not self._messages:
            self._message_arrival = asyncio.get_running_loop().create_future()
            await self._message_arrival
        return self._messages.popleft()

    async def _handle_message(self, message: Any) -> None:
        """Send the client the response or piece in a message, or receive the body if the message requests that."""
        match message:
            case relay_messages.OperationResponse():
                await self._send_response_and_report(message.make_response(self._request_id))
            case relay_messages.CompleteResponse():
                await self._send_response_and_report(message)
            case relay_messages.ResponsePart():
                await self._send_part_and_report(message)
            case relay_messages.BodyIntoSlabRequest():
                await self._receive_body(message)
            case relay_messages.BodyPartRequest():
                await self._receive_parts(until_end=message.all)
            case relay_messages.ResponseAborted():
                self._has_response_started = self._is_response_complete = True
                await self._response_sender.abort_connection()

    async def _send_response_and_report(self, message: relay_messages.CompleteResponse) -> None:
        """Send the complete response in a message and in shared slabs to the client, and report that to the
        owner.
        """
        self._has_response_started = True
        memory = self._owner.mapped_memory
        body = [
            memory[each.slab_number][each.offset : each.offset + each.nbytes]
            if isinstance(each, relay_messages.SharedSlabRange)
            else each
            for each in message.body
        ]
        await self._response_sender.send_response(message.status, message.headers, body, message.nbytes)
        self._report_sent(is_last=True)

    async def _send_part_and_report(self, message: relay_messages.ResponsePart) -> None:
        """Send a piece of a response to the client, and report that to the owner."""
        self._has_response_started = True
        if message.status:
            start = {"type": "http.response.start", "status": message.status, "headers": message.headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": message.data, "more_body": message.more})
        self._report_sent(is_last=not message.more)

    async def _receive_body(self, message: relay_messages.BodyIntoSlabRequest) -> None:
        """Receive the body into the range of a shared slab that the owner has chosen.

        Then report to the owner that the body is complete, or that its reception was aborted.
        """
        room = self._owner.mapped_memory[message.slab_number][message.offset : message.offset + message.nbytes]
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

    async def _receive_parts(self, *, until_end: bool) -> None:
        """Receive the body in pieces, and send each one to the owner.

        Stop after one piece, or if `until_end` at the end of the body.  Stop earlier if the owner requests
        that or the client disconnects.
        """
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
            more = more and until_end

    def _cancel_body(self) -> None:
        """Stop receiving the body, because the process that owns the device no longer needs it."""
        self._is_body_cancelled = True
        if self._is_body_receiving:
            self._incoming_body.abort(NotReadyError("no more of the body is wanted"))
        elif self._part_task is not None:
            self._part_task.cancel()

    def _report_sent(self, *, is_last: bool) -> None:
        """Report that the operating system has taken bytes of the response: all of them if `is_last`, else one
        piece.

        The report states whether the client was connected until the end of the response.
        """
        self._is_response_complete = is_last
        sender = self._response_sender
        is_delivered = is_last and bool(sender.is_delivered)
        self._owner.link.send_message(
            relay_messages.ResponseSent(self._number, sender.send_s, is_delivered, sender.ended_at)
        )

    def _report_disconnect(self) -> None:
        self._owner.link.send_message(relay_messages.ClientDisconnected(self._number))


def _refuse_allocation(nbytes: int) -> memoryview:
    raise AssertionError("a body that is there needs no memory")


def _decline_message(link: RelayLink, message: Any) -> None:
    """Answer a message about a request that has ended here, so that the process that sent it does not wait.

    A response is reported as not delivered, and the reception of a body as aborted.
    """
    match message:
        case relay_messages.OperationResponse() | relay_messages.CompleteResponse() | relay_messages.ResponsePart():
            link.send_message(relay_messages.ResponseSent(message.number, 0.0, is_delivered=False))
        case relay_messages.BodyIntoSlabRequest() | relay_messages.BodyPartRequest():
            link.send_message(relay_messages.BodyAborted(message.number, is_client_disconnected=True))
