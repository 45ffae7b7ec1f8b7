"""Relayed operations that are answered from a callback of the engine, without a task.

Most relayed requests are plain operations.  The application's layers, with their objects for each request, take
longer than all other work for the request in this process.  Here, everything that depends only on the header is
computed once per header.  All other requests are handled by the application.

A body that is complete when the front end relays the header is sent with it; another body of announced length is
received by the front end into the owner's memory.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from normserve.admission.client_identity import ClientIdentity, make_anonymous_identity
from normserve.admission.keys import KeyringEntry, KeyScope
from normserve.errors import ClientLeftError, NormserveError, RequestTimeoutError
from normserve.http.http_exchange import describe_request_span
from normserve.http.launch_measurements import LaunchMeasurements
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.middleware.request_middleware import parse_bearer_token
from normserve.http.problem_responses import make_problem_response
from normserve.http.relay import relay_messages
from normserve.http.relay.relayed_request import (
    INLINE_BYTES,
    FrontEndConnection,
    share_response_bytes,
    try_share_response_bytes,
)
from normserve.http.routes.operation_routes import OperationEndpoint, OperationHead, ResponseFormat, build_response
from normserve.http.transport import Buffers, Headers
from normserve.http.transport.transfer_progress import SlowTransferMonitor, TransferProgress
from normserve.jobs.job import NormJob, NormResult, RegisteredLayer
from normserve.memory.slabs import SlabPool
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.request_lifecycle import CallbackRequest, RequestServices

if TYPE_CHECKING:
    from normserve.traces.request_tracer import Attributes

_INFER = frozenset([KeyScope.INFER])


@dataclass(frozen=True, slots=True)
class PreparedHeader:
    """The header of an operation request, parsed and checked once for all requests that repeat it.

    Attributes:
        scope: the header as an ASGI scope, without the data of its connection.
        cors_headers: headers of the response, for the web page that sent the request.
        token: the API key in the header.
        headers: the request's headers by name.
    """

    scope: Scope
    operation: OperationEndpoint
    operation_head: OperationHead
    cors_headers: Headers
    token: bytes | None
    headers: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class OperationServices:
    """The objects that all relayed operations share.

    Attributes:
        operations: the endpoint of each operation, by path.
        key_authorisation: None if no keys are required.
    """

    operations: Mapping[str, OperationEndpoint]
    origin_policy: OriginPolicy
    key_authorisation: KeyAuthorisation | None
    services: RequestServices


class RelayedOperation(CallbackRequest):
    """A relayed request for an operation, which is answered without the ASGI application.

    It ends when the front end has sent the response.
    """

    _response_format: ResponseFormat
    # Memory that the front end reads until it has sent the response.
    _retained: Sequence[object] = ()
    _is_front_end_lost = False

    def __init__(
        self,
        parts: OperationServices,
        front_end: FrontEndConnection,
        request: relay_messages.RequestStarted,
        prepared: PreparedHeader,
        caller: ClientIdentity,
    ) -> None:
        record = RequestRecord(
            op=prepared.operation.op.label,
            direction=prepared.operation.direction.label,
            transport="unix" if request.client is None else "tcp",
            key_name=caller.key,
            began_at=request.began,
        )
        super().__init__(parts.services, request.request_id, prepared.headers, caller, record)
        self._front_end = front_end
        self._number = request.number
        self._header = prepared
        self._body_reader = prepared.operation.body_reader

    def admit_and_submit(self, body: memoryview) -> None:
        """Admit the request and submit its job; if that fails, send the error at once."""
        try:
            layer = self.admit_body(len(body))
        except Exception as error:
            self.respond_error(error)
            return
        self.submit_body(body, layer, 0.0)

    def admit_body(self, nbytes: int) -> RegisteredLayer | None:
        """Acquire a permit for a body of `nbytes`; return the registered layer that the request names.

        Return None if the request names no layer.

        Raises:
            NormserveError: no permit or no such layer is available, or the engine is not ready.
        """
        layer = self._header.operation.find_layer(self._header.operation_head)
        self.services.engine.require_ready()
        self._body_reader.acquire_permit(self, nbytes)
        return layer

    def submit_body(self, body: memoryview, layer: RegisteredLayer | None, receive_s: float) -> None:
        """Submit the job of a received body; its response is sent when the job ends.

        An invalid body is answered with an error at once.

        Args: receive_s: seconds from the end of the header to the end of the body.
        """
        self.record.received_bytes = len(body)
        self.record.record_received(receive_s, is_relayed=True)
        try:
            self._response_format = self._header.operation.submit_operation(
                self, self._header.operation_head, body, layer
            )
        except Exception as error:
            self.respond_error(error)

    def on_message(self, message: Any) -> None:
        """Handle the front end's report that the response was sent, or that the client disconnected."""
        match message:
            case relay_messages.ResponseSent():
                self._finish_sent(message)
            case relay_messages.ClientDisconnected():
                self.cancel_job()

    def on_progress(self, nbytes: int) -> None:
        """Do nothing: the body was received with the header."""

    def on_front_end_lost(self) -> None:
        """Cancel the request: its front end has ended, and with it the client's connection."""
        self._is_front_end_lost = True
        if self.job is None:
            self._finish_unsent()
        else:
            # The device may still work on the job: its permit is held until then.
            self.cancel_job()

    def _finish_unsent(self) -> None:
        self._finish_sent(relay_messages.ResponseSent(self._number, 0.0, is_delivered=False))

    def _finish_sent(self, sent: relay_messages.ResponseSent) -> None:
        """Finish the request, after the report that its response was sent or could not be sent."""
        self.record.record_sent(sent.seconds, sent.ended, is_relayed=True)
        self._retained = ()
        self.finish_request(is_delivered=sent.is_delivered)
        self._front_end.end_request(self._number)

    def conclude_job(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        """Send the result or the error of the job; if the front end has ended, only finish the request."""
        if self._is_front_end_lost:
            self._finish_unsent()
        else:
            super().conclude_job(ended, job)

    def send_result(self, result: NormResult, job: NormJob) -> None:
        """Build the response to a result and send it to the front end.

        A short body is sent in the message, a long one as ranges of shared slabs.  Tensors in other memory
        are copied to shared slabs first, long ones on another thread.
        """
        buffers, measured = build_response(self.record, self._response_format, result)
        nbytes = sum(map(len, buffers))
        self.record.status, self.record.sent_bytes = 200, nbytes
        if nbytes <= INLINE_BYTES:
            self._send_response(measured, [b"".join(buffers)])
            return
        shared_parts = [try_share_response_bytes(self._front_end, buffer) for buffer in buffers]
        if None in shared_parts:
            self._copy_task = asyncio.get_running_loop().create_task(self._copy_and_send(measured, buffers))
        else:
            self._send_ranges(measured, [part for part in shared_parts if part is not None])

    async def _copy_and_send(self, measured: LaunchMeasurements, buffers: Buffers) -> None:
        """Copy a response's buffers into shared slabs without blocking the event loop, then send the response.

        An error is sent in its place.
        """
        try:
            self._send_ranges(measured, [await share_response_bytes(self._front_end, buffer) for buffer in buffers])
        except Exception as error:
            self.respond_error(error)

    def _send_ranges(
        self,
        measured: LaunchMeasurements,
        shared_parts: Sequence[tuple[bytes | relay_messages.SharedSlabRange, object]],
    ) -> None:
        """Send a response that refers to shared slabs; keep the objects that hold its bytes until the front end has
        sent them.

        Args: shared_parts: the pieces of the body, each with the object that must live until then.
        """
        self._retained = [held for _, held in shared_parts]
        self._send_response(measured, [part for part, _ in shared_parts])

    def _send_response(
        self, measured: LaunchMeasurements, body: list[bytes | relay_messages.SharedSlabRange]
    ) -> None:
        """Send the response's message to the front end."""
        media_type, shared = self._response_format.media_type, self._header.cors_headers
        self._front_end.send_message(
            relay_messages.OperationResponse(self._number, media_type, measured, shared, body)
        )

    def send_problem(self, error: NormserveError) -> None:
        """Send an error response as a message to the front end."""
        status, headers, body = make_problem_response(error, self.request_id)
        self.record.sent_bytes = len(body)
        named = [*headers, *self._header.cors_headers, (b"x-request-id", self.request_id.encode())]
        self._front_end.send_message(relay_messages.ResponsePart(self._number, status, named, body, more=False))

    def describe_span(self) -> "tuple[str, Attributes]":
        scope = self._header.scope
        return describe_request_span(self, scope, scope["path"])

    def describe_log_target(self) -> tuple[str, str]:
        scope = self._header.scope
        return scope["method"], scope["path"]


HandOver = Callable[[NormserveError, int], None]


class SharedBodyOperation(RelayedOperation):
    """A relayed operation whose body the front end receives into a slab of this process.

    Attributes:
        received_bytes: the bytes of the body that have been received.
        is_complete: whether the body has been received completely.
    """

    def __init__(
        self,
        parts: OperationServices,
        front_end: FrontEndConnection,
        request: relay_messages.RequestStarted,
        prepared: PreparedHeader,
        caller: ClientIdentity,
        hand_over: HandOver,
    ) -> None:
        """Args: hand_over: has the application answer an aborted request, by its error and the received bytes."""
        super().__init__(parts, front_end, request, prepared, caller)
        self._began_at = request.began
        self._hand_to_application = hand_over
        self._layer: RegisteredLayer | None = None
        # The range that the front end writes to: not reused before the front end reports that it has stopped.
        self._shared_memory: memoryview | None = None
        self._monitor: SlowTransferMonitor | None = None
        self._failure: NormserveError | None = None
        self.received_bytes = 0
        self.is_complete = False

    def try_start_receiving(self, content_length: int) -> bool:
        """Allocate the body's slab and have the front end receive the body into it.

        Return False if the application must handle the request, for which nothing has begun.  This is the
        case if the request must be refused, or if allocating the slab would take long.
        """
        bodies = self._body_reader
        try:
            self._layer = self.admit_body(content_length)
        except NormserveError:
            return False
        assert self.permit is not None
        room = _try_allocate_body(bodies.slab_pool, content_length)
        located = None if room is None else self._front_end.locate_and_share_slab(room)
        if located is None:
            self.permit.release()
            return False
        self._shared_memory = room
        self.permit.start_receiving(self, bodies.compute_due_bytes_per_s(content_length))
        pace = TransferProgress(
            time.perf_counter(), bodies.max_pause_s, bodies.max_total_s, bodies.min_bytes_per_s, bodies.grace_s
        )
        self._monitor = SlowTransferMonitor(
            asyncio.get_running_loop(), pace, lambda: self.received_bytes, self._abort_slow
        )
        place = located.slab.number, located.offset
        self._front_end.send_message(relay_messages.BodyIntoSlabRequest(self._number, *place, content_length))
        return True

    def on_progress(self, nbytes: int) -> None:
        """Record that the body's first `nbytes` are in its slab."""
        self.received_bytes = nbytes

    def on_message(self, message: Any) -> None:
        """Handle a message of the front end: the body is complete or aborted, or the response was sent.

        An aborted request is passed to the application, which sends the error.
        """
        match message:
            case relay_messages.BodyReceived() if self._failure is None:
                self._complete_body(message)
            case relay_messages.BodyReceived() | relay_messages.BodyAborted():
                # The front end no longer writes to the slab.
                self._shared_memory = None
                self.abort(ClientLeftError("the client left while its body was received"))
                assert self._failure is not None
                self._hand_to_application(self._failure, self.received_bytes)
            case relay_messages.ClientDisconnected() if not self.is_complete:
                # `BodyAborted` or `BodyReceived` follows.
                pass
            case _:
                super().on_message(message)

    def on_front_end_lost(self) -> None:
        """Cancel the request: its front end has ended, and with it the client's connection.

        If the body is incomplete, record the number of bytes that were received.
        """
        self._stop_monitor()
        if not self.is_complete:
            self.record.error_code = ClientLeftError.code
            self.record.received_bytes = self.received_bytes
        super().on_front_end_lost()

    def abort(self, error: NormserveError) -> None:
        """Have the front end stop receiving the body, and release the permit; the error is sent later.

        When the front end has stopped, the application answers the request with `error`.  A second call does
        nothing.
        """
        if self._failure is not None:
            return
        self._failure = error
        self._stop_monitor()
        if self.permit is not None:
            self.permit.release()
        if self._shared_memory is not None:
            self._front_end.send_message(relay_messages.BodyStopRequest(self._number))

    def _complete_body(self, message: relay_messages.BodyReceived) -> None:
        """Submit the job of the complete body; from now on its permit cannot be revoked."""
        assert self.permit is not None
        assert self._shared_memory is not None
        self._stop_monitor()
        self.received_bytes, self.is_complete = message.nbytes, True
        self.permit.complete_body()
        body, self._shared_memory = self._shared_memory[: message.nbytes], None
        self.submit_body(body, self._layer, message.ended - self._began_at)

    def _abort_slow(self, fault: str) -> None:
        self.abort(RequestTimeoutError(fault))

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()


def _try_allocate_body(slabs: SlabPool, nbytes: int) -> memoryview | None:
    """Return a slab for a body; return None if none can be allocated without delay."""
    if slabs.source.is_slow:
        return slabs.borrow_idle(nbytes)
    try:
        return slabs.borrow(nbytes)
    except MemoryError:
        return None


class OperationDispatcher:
    """Decides which relayed requests are answered without the ASGI application, and begins them.

    Attributes:
        services: the objects that these requests use.
    """

    def __init__(self, parts: OperationServices) -> None:
        self.services = parts

    def find_tenant(self, request: relay_messages.RequestStarted, scope: Scope) -> str | None:
        """Return the tenant that sends a request; None if its key is missing or unknown."""
        authorisation = self.services.key_authorisation
        if authorisation is None:
            return make_anonymous_identity(_get_client_address(request)).tenant_name
        grant = authorisation.find_key_entry(parse_bearer_token(dict(scope["headers"])))
        return None if grant is None else grant.get_identity(_get_client_address(request)).tenant_name

    def prepare_header(self, scope: Scope, tenant: str) -> PreparedHeader | None:
        """Parse and check a request's header; the result serves all requests with the same header.

        Return None if the application must handle these requests: they are invalid, or not for an
        operation.

        Args: tenant: the sender of the request.
        """
        operation = self.services.operations.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return None
        headers = dict(scope["headers"])
        try:
            shared, preflight = self.services.origin_policy.check_request(scope, headers)
            head = operation.prepare_head(scope["query_string"], headers, tenant)
        except Exception:
            # In the application the error occurs again, and is answered.
            return None
        if preflight is not None:
            return None
        return PreparedHeader(scope, operation, head, shared, parse_bearer_token(headers), headers)

    def try_begin_complete_request(
        self, front_end: FrontEndConnection, request: relay_messages.RequestStarted, prepared: PreparedHeader
    ) -> RelayedOperation | None:
        """Begin a request whose body was sent together with its header.

        Return None if the application must handle the request, because its key is refused or over its rate
        limit.
        """
        grant, caller = self._find_client_identity(request, prepared)
        if caller is None:
            return None
        try:
            if grant is not None:
                grant.take_token()
        except NormserveError:
            return None
        direct = RelayedOperation(self.services, front_end, request, prepared, caller)
        assert request.body is not None
        direct.admit_and_submit(memoryview(request.body))
        return direct

    def find_client_identity(
        self, request: relay_messages.RequestStarted, prepared: PreparedHeader
    ) -> ClientIdentity | None:
        """Return the sender of a request; None if the application must handle the request.

        The application refuses keys that do not allow operations.  It also handles keys with a rate limit,
        since a request that is passed on to the application later would be counted twice.
        """
        grant, caller = self._find_client_identity(request, prepared)
        return caller if grant is None or grant.token_bucket is None else None

    def _find_client_identity(
        self, request: relay_messages.RequestStarted, prepared: PreparedHeader
    ) -> tuple[KeyringEntry | None, ClientIdentity | None]:
        """Return the entry of the request's key, and the sender; the sender is None if the key is refused.

        The entry is None if no keys are required, or if the key is unknown.
        """
        address = _get_client_address(request)
        authorisation = self.services.key_authorisation
        if authorisation is None:
            return None, make_anonymous_identity(address)
        grant = authorisation.find_key_entry(prepared.token)
        try:
            return grant, authorisation.require_scope(grant, prepared.token, _INFER).get_identity(address)
        except NormserveError:
            return grant, None


def _get_client_address(request: relay_messages.RequestStarted) -> str:
    return "unix" if request.client is None else request.client[0]
