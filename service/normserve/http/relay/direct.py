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

from normserve.admission.callers import Caller, anonymous
from normserve.admission.keys import Grant, KeyScope
from normserve.errors import NormserveError
from normserve.http.edge.middleware import bearer_token
from normserve.http.edge.origins import Origins
from normserve.http.measured import Measured
from normserve.http.problems import problem
from normserve.http.relay import messages
from normserve.http.relay.exchange import INLINE_BYTES, FrontEnd, part_at_once, part_of
from normserve.http.routes.operations import Head, Operation, answer
from normserve.http.routes.payloads import Told
from normserve.http.spans import describe_span
from normserve.http.transport import Buffers, Headers
from normserve.jobs.job import Layer, NormJob, NormResult
from normserve.metrics.requests import RequestRecord
from normserve.requests.authorisation import Authorisation
from normserve.requests.lifecycle import CallbackRequest, RequestServices

if TYPE_CHECKING:
    from normserve.traces.traces import Attributes

_INFER = frozenset([KeyScope.INFER])


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a header says of all the requests that have it.

    Attributes:
        scope: the header as ASGI has it, but for what its connection says.
        shared: headers of the response, for the page that sent the request.
        token: the API key that it brings.
        headers: its own.
    """

    scope: Scope
    operation: Operation
    head: Head
    shared: Headers
    token: bytes | None
    headers: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Parts:
    """What these requests are answered with."""

    operations: Mapping[str, Operation]
    origins: Origins
    authorisation: Authorisation | None
    services: RequestServices


class DirectRequest(CallbackRequest):
    """One request under way, until its response has been sent."""

    _form: Told
    # What the front end reads until it has sent it.
    _held: Sequence[object] = ()
    _is_lost = False

    def __init__(
        self, parts: Parts, front_end: FrontEnd, request: messages.Request, prepared: Prepared, caller: Caller
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

    def admit(self, nbytes: int) -> Layer | None:
        """Take a permit for a body of so many bytes; the layer that the request names, if any.

        Raises:
            NormserveError: there is none for it, or something is wrong with its header.
        """
        layer = self._prepared.operation.layer_of(self._prepared.head)
        self.services.engine.require_ready()
        self._bodies.admit(self, nbytes)
        return layer

    def compute(self, body: memoryview, layer: Layer | None, received_s: float) -> None:
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
            case messages.Sent():
                self._end(message)
            case messages.Left():
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
        self._end(messages.Sent(self._number, 0.0, is_delivered=False))

    def _end(self, sent: messages.Sent) -> None:
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
        buffers, measured = answer(self.record, self._form, result)
        nbytes = sum(map(len, buffers))
        self.record.status, self.record.sent = 200, nbytes
        if nbytes <= INLINE_BYTES:
            self._respond(measured, [b"".join(buffers)])
            return
        told = [part_at_once(self._front_end, buffer) for buffer in buffers]
        if None in told:
            self._copying = asyncio.get_running_loop().create_task(self._copy_and_respond(measured, buffers))
        else:
            self._respond_parts(measured, [part for part in told if part is not None])

    async def _copy_and_respond(self, measured: Measured, buffers: Buffers) -> None:
        try:
            self._respond_parts(measured, [await part_of(self._front_end, buffer) for buffer in buffers])
        except Exception as error:
            self.refuse(error)

    def _respond_parts(self, measured: Measured, told: Sequence[tuple[bytes | messages.Part, object]]) -> None:
        self._held = [held for _, held in told]
        self._respond(measured, [part for part, _ in told])

    def _respond(self, measured: Measured, body: list[bytes | messages.Part]) -> None:
        media_type, shared = self._form.media_type, self._prepared.shared
        self._front_end.send(messages.Result(self._number, media_type, measured, shared, body))

    def send_problem(self, error: NormserveError) -> None:
        status, headers, body = problem(error, self.request_id)
        self.record.sent = len(body)
        named = [*headers, *self._prepared.shared, (b"x-request-id", self.request_id.encode())]
        self._front_end.send(messages.Send(self._number, status, named, body, more=False))

    def describe_span(self) -> "tuple[str, Attributes]":
        scope = self._prepared.scope
        return describe_span(self, scope, scope["path"])

    def describe_target(self) -> tuple[str, str]:
        scope = self._prepared.scope
        return scope["method"], scope["path"]


class Direct:
    """Finds out which requests can be answered so.

    Attributes:
        parts: what they are answered with.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def find_tenant(self, request: messages.Request, scope: Scope) -> str | None:
        """Return the tenant that sends a request; None if its key is missing or unknown."""
        authorisation = self.parts.authorisation
        if authorisation is None:
            return anonymous(_address_of(request)).tenant
        grant = authorisation.find(bearer_token(dict(scope["headers"])))
        return None if grant is None else grant.caller(_address_of(request)).tenant

    def prepare(self, scope: Scope, tenant: str) -> Prepared | None:
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
        return Prepared(scope, operation, head, shared, bearer_token(headers), headers)

    def begin(self, front_end: FrontEnd, request: messages.Request, prepared: Prepared) -> DirectRequest | None:
        """Begin a request whose body is there; None where the application must say why it may not."""
        grant, caller = self._who(request, prepared)
        if caller is None:
            return None
        try:
            if grant is not None:
                grant.take_request()
        except NormserveError:
            return None
        direct = DirectRequest(self.parts, front_end, request, prepared, caller)
        assert request.body is not None
        direct.begin(memoryview(request.body))
        return direct

    def caller(self, request: messages.Request, prepared: Prepared) -> Caller | None:
        """Who sends a request; None where the application must say why it may not, and where requests are counted:
        what is handed over to the application would count twice.
        """
        grant, caller = self._who(request, prepared)
        return caller if grant is None or grant.rate is None else None

    def _who(self, request: messages.Request, prepared: Prepared) -> tuple[Grant | None, Caller | None]:
        address = _address_of(request)
        authorisation = self.parts.authorisation
        if authorisation is None:
            return None, anonymous(address)
        grant = authorisation.find(prepared.token)
        try:
            return grant, authorisation.require(grant, prepared.token, _INFER).caller(address)
        except NormserveError:
            return grant, None


def _address_of(request: messages.Request) -> str:
    return "unix" if request.client is None else request.client[0]
