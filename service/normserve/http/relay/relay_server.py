"""The owner's side of the relay: relayed requests are answered by the application like any others."""

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Scope

from normserve.engine.busy_polling import BusyPoller
from normserve.errors import NormserveError
from normserve.errors.problems import convert_unexpected_error
from normserve.http.problem_responses import make_problem_response
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_link import RelayLink
from normserve.http.relay.relay_messages import OwnerReadiness
from normserve.http.relay.relayed_operations import (
    OperationDispatcher,
    PreparedHeader,
    RelayedOperation,
    SharedBodyOperation,
)
from normserve.http.relay.relayed_request import RelayedRequest
from normserve.memory.shared_slabs import SharedSlabRegistry, SlabLocation
from normserve.memory.slabs import SlabPool
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

log = logging.getLogger(__name__)

# Bounds of a prepared header's memory: in all, for each field, and for each byte of the message with the header.
_HEAD_BYTES, _FIELD_BYTES, _BYTES_PER_HEAD_BYTE = 2**11, 2**8, 3
_POLL_S = 0.02
# Interval between heartbeats to front ends, which also report slabs that the pool has freed.
_BEAT_S = 0.5

_OF_A_REQUEST = frozenset(
    [
        relay_messages.ResponseSent,
        relay_messages.BodyReceived,
        relay_messages.BodyPart,
        relay_messages.BodyAborted,
        relay_messages.ClientDisconnected,
    ]
)

_ASGI = {"version": "3.0", "spec_version": "2.3"}


class RelayServer:
    """Answers the requests that front end processes relay to this process, which owns a device.

    Only the event loop's thread may use it.
    """

    def __init__(
        self,
        shared: SharedSlabRegistry,
        slabs: SlabPool,
        metrics: Metrics,
        prepared: PreparedCallCache,
        polling: BusyPoller | None = None,
    ) -> None:
        """Args:
        slabs: a pool whose memory is from `shared`.
        prepared: the cache of prepared headers.
        polling: for messages of front ends; None if the event loop sleeps between them.
        """
        self._shared_slabs = shared
        self._slab_pool = slabs
        self._metrics = metrics
        self._busy_poller = polling
        self._asgi_app: ASGIApp | None = None
        self._dispatcher: OperationDispatcher | None = None
        self._prepared_calls = prepared
        self._front_ends: set[_FrontEndSession] = set()
        self._is_ready = False
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    def set_application(self, entrance: ASGIApp, direct: OperationDispatcher | None) -> None:
        """Set the application that answers requests; called before the first request.

        Args:
            entrance: the application.
            direct: answers operations without the application; None if the application answers all requests.
        """
        self._asgi_app, self._dispatcher = entrance, direct

    @property
    def connection_count(self) -> int:
        """The number of clients that are connected to front ends."""
        return sum([each.connection_count for each in self._front_ends])

    def describe_front_ends(self) -> list[dict[str, int]]:
        """Return the index and process id of each connected front end, sorted by index.

        The link of one that starts is there before its first message, which has both.
        """
        hellos = [each.hello for each in self._front_ends if each.hello is not None]
        there = sorted((hello.index, hello.pid) for hello in hellos)
        return [{"index": index, "pid": pid} for index, pid in there]

    def serve_front_end(self, connected: socket.socket) -> None:
        """Begin to serve a front end over a connected socket."""
        of_all = (
            self._shared_slabs,
            self._slab_pool,
            self._metrics,
            self._begin_request,
            self._admit_or_close_front_end,
            self._busy_poller,
        )
        front_end = _FrontEndSession(connected, *of_all)
        front_end.on_lost = functools.partial(self._front_ends.discard, front_end)
        self._front_ends.add(front_end)
        if self._heartbeat_timer is None:
            self._send_heartbeats_and_freed_slabs()

    def report_readiness(self, *, ready: bool) -> None:
        """Report to all front ends whether this process accepts work."""
        self._is_ready = ready
        for each in self._front_ends:
            each.send_message(OwnerReadiness(ready))

    async def close(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until all requests are answered, then end all links."""
        give_up = asyncio.get_running_loop().time() + within_s
        while any(each.is_busy for each in self._front_ends) and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(_POLL_S)
        for each in tuple(self._front_ends):
            each.close()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()

    def _send_heartbeats_and_freed_slabs(self) -> None:
        """Report the readiness and the freed slabs to all front ends, at once and then every half second."""
        numbers = self._shared_slabs.take_freed_numbers()
        for each in self._front_ends:
            each.report_removed_slabs(numbers)
            each.send_heartbeat(OwnerReadiness(self._is_ready))
        self._heartbeat_timer = asyncio.get_running_loop().call_later(
            _BEAT_S, self._send_heartbeats_and_freed_slabs
        )

    def _admit_or_close_front_end(self, front_end: "_FrontEndSession") -> None:
        """Answer the first message of a front end with this process's readiness; close the link if it is a second
        one.

        If the same front end is already connected, its second link is closed.
        """
        if any(each.hello == front_end.hello for each in self._front_ends if each is not front_end):
            front_end.close()
        else:
            front_end.send_message(OwnerReadiness(self._is_ready))

    def _begin_request(
        self, front_end: "_FrontEndSession", request: relay_messages.RequestStarted
    ) -> RelayedOperation | RelayedRequest:
        """Begin to answer a relayed request, if possible without the ASGI application."""
        head = self._prepare_scope(request)
        if head.header is not None and self._dispatcher is not None:
            if request.body is not None:
                direct = self._dispatcher.try_begin_complete_request(front_end, request, head.header)
            else:
                direct = self._try_begin_shared_body(self._dispatcher, front_end, request, head.scope, head.header)
            if direct is not None:
                return direct
        assert self._asgi_app is not None
        return RelayedRequest(front_end, request, head.scope, self._asgi_app)

    def _try_begin_shared_body(
        self,
        direct: OperationDispatcher,
        front_end: "_FrontEndSession",
        request: relay_messages.RequestStarted,
        scope: Scope,
        prepared: PreparedHeader,
    ) -> RelayedOperation | None:
        """Begin an operation, and have the front end receive its body into a slab of this process.

        Return None if the application must handle the request.  If the reception of the body is aborted
        later, the application sends the error.
        """
        caller = direct.find_client_identity(request, prepared) if request.content_length else None
        if caller is None:
            return None

        def hand_over(error: NormserveError, received: int) -> None:
            assert self._asgi_app is not None
            relayed = RelayedRequest(front_end, request, scope, self._asgi_app)
            relayed.abort_body_before_start(error, received)
            front_end.replace_request(request.number, relayed)

        operation = SharedBodyOperation(direct.services, front_end, request, prepared, caller, hand_over)
        assert request.content_length is not None
        return operation if operation.try_start_receiving(request.content_length) else None

    def _prepare_scope(self, request: relay_messages.RequestStarted) -> "_PreparedScope":
        """Return the ASGI scope of a request, together with its parsed and checked header if it is for an
        operation.

        Requests from one address with identical headers share the cached object.  Where keys are required,
        only headers with a valid key are cached.
        """
        # The address is None for a Unix socket; the key includes that, too.
        key = request.head, None if request.client is None else request.client[0]
        prepared_scope: _PreparedScope | None = self._prepared_calls.find(key)
        if prepared_scope is not None:
            return prepared_scope
        head = relay_messages.read_head(request.head)
        scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": head.http_version,
            "server": head.server,
            "scheme": head.scheme,
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "client": request.client,
        }
        tenant = None if self._dispatcher is None else self._dispatcher.find_tenant(request, scope)
        if self._dispatcher is None or tenant is None:
            return _PreparedScope(scope, None)
        prepared_scope = _PreparedScope(scope, self._dispatcher.prepare_header(scope, tenant))
        nbytes = _HEAD_BYTES + _FIELD_BYTES * len(head.headers) + _BYTES_PER_HEAD_BYTE * len(request.head)
        self._prepared_calls.try_store(key, prepared_scope, nbytes, tenant)
        return prepared_scope


class _PreparedScope(NamedTuple):
    """A request's ASGI scope, together with its parsed and checked header if it is for an operation.

    Attributes:
        scope: the scope without data of the connection.
        header: None if the application must handle requests with this header.
    """

    scope: Scope
    header: PreparedHeader | None


class _FrontEndSession:
    """The link to one front end, and its requests in progress.

    Attributes:
        hello: the front end's index and process id; None before its first message.
        connection_count: the number of clients that are connected to the front end.
        on_lost: called when the link has ended.
    """

    def __init__(
        self,
        connected: socket.socket,
        shared: SharedSlabRegistry,
        slabs: SlabPool,
        metrics: Metrics,
        begin: Callable[["_FrontEndSession", relay_messages.RequestStarted], RelayedOperation | RelayedRequest],
        on_hello: Callable[["_FrontEndSession"], None],
        polling: BusyPoller | None,
    ) -> None:
        self.slab_pool = slabs
        self.hello: relay_messages.FrontEndHello | None = None
        self.connection_count = 0
        self.on_lost: Callable[[], None] = lambda: None
        self._shared_slabs = shared
        self._metrics = metrics
        self._begin, self._on_hello = begin, on_hello
        self._mapped_numbers: set[int] = set()
        self._requests: dict[int, RelayedOperation | RelayedRequest] = {}
        self._link = RelayLink(
            connected,
            relay_messages.from_front_end,
            self._on_message,
            self._on_link_end,
            shares_memory=True,
            polling=polling,
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests of this front end are in progress."""
        return bool(self._requests)

    def send_message(self, message: msgspec.Struct) -> None:
        self._link.send_message(message)

    def send_heartbeat(self, readiness: OwnerReadiness) -> None:
        """Send a heartbeat, unless earlier messages are still unsent."""
        if not self._link.is_backlogged:
            self._link.send_message(readiness)

    def close(self) -> None:
        """End the link."""
        self._link.close()

    def locate_and_share_slab(self, view: memoryview) -> SlabLocation | None:
        """Return the shared slab that contains these bytes, and their offset in it; None if they are in other
        memory.

        If the front end has not mapped the slab, send it the slab's file descriptor first.
        """
        located = self._shared_slabs.locate(view)
        if located is not None and located.slab.number not in self._mapped_numbers:
            self._mapped_numbers.add(located.slab.number)
            self._link.send_message(relay_messages.SharedSlabAdded(located.slab.number), located.slab.descriptor)
        return located

    def report_removed_slabs(self, numbers: list[int]) -> None:
        """Have the front end unmap these slabs, if it has mapped them: they no longer exist here."""
        mapped = self._mapped_numbers.intersection(numbers)
        if mapped:
            self._mapped_numbers -= mapped
            self._link.send_message(relay_messages.SharedSlabRemoved(list(mapped)))

    def replace_request(self, number: int, request: RelayedRequest) -> None:
        """Have the application answer a request from now on."""
        self._requests[number] = request

    def end_request(self, number: int) -> None:
        """Ignore later messages about a request."""
        self._requests.pop(number, None)

    def _on_message(self, message: Any) -> None:
        """Handle a message of the front end: about a request, its identity, or its counts."""
        kind = type(message)
        if kind in _OF_A_REQUEST:
            if (request := self._requests.get(message.number)) is not None:
                request.on_message(message)
        elif kind is relay_messages.RequestStarted:
            try:
                self._requests[message.number] = self._begin(self, message)
            except Exception as error:
                self._refuse_request(message, error)
        elif kind is relay_messages.FrontEndHello:
            self.hello = message
            self._on_hello(self)
        elif kind is relay_messages.ConnectionCount:
            self.connection_count = message.count
        elif kind is relay_messages.RefusalCount:
            for _ in range(message.count):
                self._metrics.observe_request(RequestRecord(status=message.status, error_code=message.code))
        elif kind is relay_messages.UnreadResponseCount:
            for _ in range(message.count):
                self._metrics.observe_unread_response_disconnect()
        else:
            assert kind is relay_messages.BodyProgress
            for number, nbytes in message.received.items():
                if (request := self._requests.get(number)) is not None:
                    request.on_progress(nbytes)

    def _refuse_request(self, request: relay_messages.RequestStarted, error: Exception) -> None:
        """Answer a request with an error, because an unexpected exception occurred when it began."""
        log.error("unexpected error in a relayed request", exc_info=error)
        reported_error = convert_unexpected_error(error)
        status, headers, body = make_problem_response(reported_error, request.request_id)
        self._metrics.observe_request(RequestRecord(status=status, error_code=reported_error.code))
        self.send_message(relay_messages.ResponsePart(request.number, status, headers, body, more=False))

    def _on_link_end(self) -> None:
        """Cancel all requests of the front end, because the link to it has ended."""
        for request in tuple(self._requests.values()):
            request.on_front_end_lost()
        self._requests.clear()
        self.on_lost()
