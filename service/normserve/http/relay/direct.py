"""Relayed operations that are answered from a callback of the engine, without a task.

Most relayed requests are plain operations.  The application's layers, with their objects for each request, take
longer than the rest of the work for it in this process.  Here, everything that depends only on the header is
computed once per header.  All other requests are handled by the application.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from normserve.admission.callers import ClientIdentity, make_anonymous_identity
from normserve.admission.keys import KeyringEntry, KeyScope
from normserve.errors import NormserveError
from normserve.http.edge.middleware import parse_bearer_token
from normserve.http.edge.origins import OriginPolicy
from normserve.http.measured import LaunchMeasurements
from normserve.http.problems import make_problem_response
from normserve.http.relay import messages
from normserve.http.relay.exchange import (
    INLINE_BYTES,
    FrontEndConnection,
    share_response_bytes,
    try_share_response_bytes,
)
from normserve.http.routes.operations import OperationEndpoint, OperationHead, build_response
from normserve.http.routes.payloads import ResponseFormat
from normserve.http.spans import describe_request_span
from normserve.http.transport import Buffers, Headers
from normserve.jobs.job import NormJob, NormResult, RegisteredLayer
from normserve.metrics.requests import RequestRecord
from normserve.requests.authorisation import KeyAuthorisation
from normserve.requests.lifecycle import CallbackRequest, RequestServices

if TYPE_CHECKING:
    from normserve.traces.traces import Attributes

_INFER = frozenset([KeyScope.INFER])


@dataclass(frozen=True, slots=True)
class PreparedHeader:
    """What a header says of all the requests that have it.

    Attributes:
        scope: the header as ASGI has it, but for what its connection says.
        shared: headers of the response, for the page that sent the request.
        token: the API key that it brings.
        headers: its own.
    """

    scope: Scope
    operation: OperationEndpoint
    head: OperationHead
    shared: Headers
    token: bytes | None
    headers: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class OperationServices:
    """What these requests are answered with."""

    operations: Mapping[str, OperationEndpoint]
    origins: OriginPolicy
    authorisation: KeyAuthorisation | None
    services: RequestServices


class RelayedOperation(CallbackRequest):
    """One request under way, until its response has been sent."""

    _form: ResponseFormat
    # What the front end reads until it has sent it.
    _held: Sequence[object] = ()
    _is_lost = False

    def __init__(
        self,
        parts: OperationServices,
        front_end: FrontEndConnection,
        request: messages.RequestStarted,
        prepared: PreparedHeader,
        caller: ClientIdentity,
    ) -> None:
        record = RequestRecord(
            op=prepared.operation.op.label,
            direction=prepared.operation.direction.label,
            transport="unix" if request.client is None else "tcp",
            key=caller.key,
            began=request.began,
        )
        super().__init__(parts.services, request.request_id, prepared.headers, caller, record)
        self._front_end = front_end
        self._number = request.number
        self._prepared = prepared
        self._bodies = prepared.operation.bodies

    def begin(self, body: memoryview) -> None:
        """Have it computed; it is answered then, or at once if something is wrong with it."""
        try:
            layer = self.admit(len(body))
        except Exception as error:
            self.refuse(error)
            return
        self.compute(body, layer, 0.0)

    def admit(self, nbytes: int) -> RegisteredLayer | None:
        """Take a permit for a body of so many bytes; the layer that the request names, if any.

        Raises:
            NormserveError: there is none for it, or something is wrong with its header.
        """
        layer = self._prepared.operation.layer_of(self._prepared.head)
        self.services.engine.require_ready()
        self._bodies.admit(self, nbytes)
        return layer

    def compute(self, body: memoryview, layer: RegisteredLayer | None, received_s: float) -> None:
        """Compute a received body and send its response.

        Args: received_s: seconds from the header to the end of the body.
        """
        self.record.received = len(body)
        self.note_received(received_s)
        try:
            self._form = self._prepared.operation.begin(self, self._prepared.head, body, layer)
        except Exception as error:
            self.refuse(error)

    def on_message(self, message: Any) -> None:
        """What the front end says about it."""
        match message:
            case messages.ResponseSent():
                self._end(message)
            case messages.ClientDisconnected():
                self.withdraw()

    def on_progress(self, nbytes: int) -> None:
        """Its body has come: there is none to tell."""

    def on_lost(self) -> None:
        """The front end is gone, and its clients with it."""
        self._is_lost = True
        if self.job is None:
            self._end_unsent()
        else:
            # The device may work on it still: its permit is held as long.
            self.withdraw()

    def _end_unsent(self) -> None:
        self._end(messages.ResponseSent(self._number, 0.0, is_delivered=False))

    def _end(self, sent: messages.ResponseSent) -> None:
        """The response has been sent, or never will be."""
        if "kernel" in self.record.stages:
            self.record.stages["send"] = sent.seconds
        self._held = ()
        self.account(is_delivered=sent.is_delivered)
        self._front_end.end(self._number)

    def conclude(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        if self._is_lost:
            self._end_unsent()
        else:
            super().conclude(ended, job)

    def send_result(self, result: NormResult, job: NormJob) -> None:
        buffers, measured = build_response(self.record, self._form, result)
        nbytes = sum(map(len, buffers))
        self.record.status, self.record.sent = 200, nbytes
        if nbytes <= INLINE_BYTES:
            self._respond(measured, [b"".join(buffers)])
            return
        told = [try_share_response_bytes(self._front_end, buffer) for buffer in buffers]
        if None in told:
            self._copying = asyncio.get_running_loop().create_task(self._copy_and_respond(measured, buffers))
        else:
            self._respond_parts(measured, [part for part in told if part is not None])

    async def _copy_and_respond(self, measured: LaunchMeasurements, buffers: Buffers) -> None:
        try:
            self._respond_parts(
                measured, [await share_response_bytes(self._front_end, buffer) for buffer in buffers]
            )
        except Exception as error:
            self.refuse(error)

    def _respond_parts(
        self, measured: LaunchMeasurements, told: Sequence[tuple[bytes | messages.SharedSlabRange, object]]
    ) -> None:
        self._held = [held for _, held in told]
        self._respond(measured, [part for part, _ in told])

    def _respond(self, measured: LaunchMeasurements, body: list[bytes | messages.SharedSlabRange]) -> None:
        media_type, shared = self._form.media_type, self._prepared.shared
        self._front_end.send(messages.OperationResponse(self._number, media_type, measured, shared, body))

    def send_problem(self, error: NormserveError) -> None:
        status, headers, body = make_problem_response(error, self.request_id)
        self.record.sent = len(body)
        named = [*headers, *self._prepared.shared, (b"x-request-id", self.request_id.encode())]
        self._front_end.send(messages.ResponsePart(self._number, status, named, body, more=False))

    def describe_span(self) -> "tuple[str, Attributes]":
        scope = self._prepared.scope
        return describe_request_span(self, scope, scope["path"])

    def describe_target(self) -> tuple[str, str]:
        scope = self._prepared.scope
        return scope["method"], scope["path"]


class OperationDispatcher:
    """Finds out which requests can be answered so.

    Attributes:
        parts: what they are answered with.
    """

    def __init__(self, parts: OperationServices) -> None:
        self.parts = parts

    def find_tenant(self, request: messages.RequestStarted, scope: Scope) -> str | None:
        """Return the tenant that sends a request; None if its key is missing or unknown."""
        authorisation = self.parts.authorisation
        if authorisation is None:
            return make_anonymous_identity(_get_client_address(request)).tenant
        grant = authorisation.find(parse_bearer_token(dict(scope["headers"])))
        return None if grant is None else grant.caller(_get_client_address(request)).tenant

    def prepare(self, scope: Scope, tenant: str) -> PreparedHeader | None:
        """What a header says; None where it is for the application.

        Args: tenant: that sends it.
        """
        operation = self.parts.operations.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return None
        headers = dict(scope["headers"])
        try:
            shared, preflight = self.parts.origins.admit(scope, headers)
            head = operation.prepare_head(scope["query_string"], headers, tenant)
        except Exception:
            # Whatever it is, the application meets it again, and answers.
            return None
        if preflight is not None:
            return None
        return PreparedHeader(scope, operation, head, shared, parse_bearer_token(headers), headers)

    def begin(
        self, front_end: FrontEndConnection, request: messages.RequestStarted, prepared: PreparedHeader
    ) -> RelayedOperation | None:
        """Begin a request whose body is there; None where the application must say why it may not."""
        grant, caller = self._who(request, prepared)
        if caller is None:
            return None
        try:
            if grant is not None:
                grant.take_request()
        except NormserveError:
            return None
        direct = RelayedOperation(self.parts, front_end, request, prepared, caller)
        assert request.body is not None
        direct.begin(memoryview(request.body))
        return direct

    def caller(self, request: messages.RequestStarted, prepared: PreparedHeader) -> ClientIdentity | None:
        """Who sends a request; None where the application must say why it may not, and where requests are counted:
        what is handed over to the application would count twice.
        """
        grant, caller = self._who(request, prepared)
        return caller if grant is None or grant.rate is None else None

    def _who(
        self, request: messages.RequestStarted, prepared: PreparedHeader
    ) -> tuple[KeyringEntry | None, ClientIdentity | None]:
        address = _get_client_address(request)
        authorisation = self.parts.authorisation
        if authorisation is None:
            return None, make_anonymous_identity(address)
        grant = authorisation.find(prepared.token)
        try:
            return grant, authorisation.require(grant, prepared.token, _INFER).caller(address)
        except NormserveError:
            return grant, None


def _get_client_address(request: messages.RequestStarted) -> str:
    return "unix" if request.client is None else request.client[0]
