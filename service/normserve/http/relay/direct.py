"""Relayed operations that are answered from a callback of the engine, without a task.

Most relayed requests are plain operations.  The application's layers, with their objects for each request, take
longer than the rest of the work for it in this process.  Here, everything that depends only on the header is
computed once per header.  All other requests are handled by the application.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Scope

from normserve.admission.callers import Caller, anonymous
from normserve.admission.keys import Grant, Keyring, KeyScope
from normserve.admission.permits import Limits, Permit
from normserve.engine.progress import Progress
from normserve.errors import NormserveError
from normserve.errors.problems import status_of, unexpected
from normserve.http.edge.middleware import bearer_token
from normserve.http.edge.origins import Origins
from normserve.http.edge.spans import HttpSpans
from normserve.http.measured import Measured
from normserve.http.problems import problem
from normserve.http.relay import messages
from normserve.http.relay.exchange import INLINE_BYTES, FrontEnd, part_at_once, part_of
from normserve.http.routes.operations import Head, Operation, answer
from normserve.http.routes.payloads import Told
from normserve.http.transport import Buffers, Headers
from normserve.jobs.job import Layer, NormJob, NormResult
from normserve.logs import failures
from normserve.metrics.metrics import Metrics
from normserve.metrics.requests import CLIENT_LEFT, RequestRecord
from normserve.traces.parent import log_fields

log = logging.getLogger(__name__)

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
    """What these requests are answered with.

    Attributes:
        spans: where requests are traced.
    """

    operations: Mapping[str, Operation]
    origins: Origins
    keys: Keyring | None
    limits: Limits
    metrics: Metrics
    progress: Progress
    spans: HttpSpans | None = None


class DirectRequest:
    """One request under way, until its response has been sent."""

    _permit: Permit | None = None
    _job: NormJob | None = None
    _form: Told
    # What the front end reads until it has sent it.
    _held: Sequence[object] = ()
    _is_lost = False

    def __init__(
        self, parts: Parts, front_end: FrontEnd, request: messages.Request, prepared: Prepared, caller: Caller
    ) -> None:
        self._parts = parts
        self._front_end = front_end
        self._number = request.number
        self._prepared = prepared
        self._computing = prepared.operation.computing
        self._caller = caller
        self._record = RequestRecord(
            op=prepared.operation.op.label,
            direction=prepared.operation.direction.label,
            transport="unix" if request.client is None else "tcp",
            key=caller.key,
            began=request.began,
        )
        self._request_id = request.request_id

    def begin(self, body: memoryview) -> None:
        """Have it computed; it is answered then, or at once if something is wrong with it."""
        try:
            layer = self.admit(len(body))
        except Exception as error:
            self._refuse(error)
            return
        self.compute(body, layer, 0.0)

    def admit(self, nbytes: int) -> Layer | None:
        """Take a permit for a body of so many bytes; the layer that the request names, if any.

        Raises:
            NormserveError: there is none for it, or something is wrong with its header.
        """
        layer = self._prepared.operation.layer_of(self._prepared.head)
        self._computing.engine.require_ready()
        self._computing.bodies.require_short(nbytes)
        self._permit = self._parts.limits.acquire(nbytes, self._caller.tenant, self._caller.max_inflight_bytes)
        return layer

    def compute(self, body: memoryview, layer: Layer | None, received_s: float) -> None:
        """Have a body computed that has come, within so many seconds of its header."""
        record, computing, head = self._record, self._computing, self._prepared.head
        record.received, record.stages["recv"] = len(body), received_s
        record.waiting_in = "parse"
        try:
            job, cost, self._form = head.with_body(body, layer, self._charge_copy)
            computing.admit(self._permit, record, job, cost, len(body))
            computing.engine.begin(job, computing.deadline(record, head.timeout_ms), self._conclude)
        except Exception as error:
            self._refuse(error)
            return
        self._job = job
        self._parts.progress.begin()

    def _charge_copy(self, nbytes: int) -> None:
        self._computing.admission.charge_copy(self._permit, nbytes)

    def on_message(self, message: Any) -> None:
        """What the front end says about it."""
        match message:
            case messages.Sent():
                self._end(message)
            case messages.Left() if self._job is not None:
                self._computing.engine.withdraw(self._job)

    def on_progress(self, nbytes: int) -> None:
        """Its body has come: there is none to tell."""

    def on_lost(self) -> None:
        """The front end is gone, and its clients with it."""
        self._is_lost = True
        if self._job is None:
            self._end_unsent()
        else:
            # The device may work on it still: its permit is held as long.
            self._computing.engine.withdraw(self._job)

    def _end_unsent(self) -> None:
        self._end(messages.Sent(self._number, 0.0, is_delivered=False))

    def _end(self, sent: messages.Sent) -> None:
        """The response has been sent, or never will be."""
        record = self._record
        if "kernel" in record.stages:
            record.stages["send"] = sent.seconds
        if not sent.is_delivered:
            record.status = CLIENT_LEFT
        if self._permit is not None:
            self._permit.release()
        self._held = ()
        if (spans := self._parts.spans) is not None:
            prepared, address = self._prepared, self._caller.address
            spans.end(record, prepared.headers, prepared.scope, self._request_id, address)
        self._parts.metrics.observe_request(record)
        self._front_end.end(self._number)

    def _conclude(self, ended: NormResult | NormserveError) -> None:
        assert self._job is not None
        self._computing.engine.end(self._job)
        self._parts.progress.end()
        self._job = None
        if self._is_lost:
            self._end_unsent()
            return
        # Not raised: its traceback would hold this frame, and with it the job.
        if isinstance(ended, NormserveError):
            self._refuse(ended)
            return
        try:
            buffers, measured = answer(self._record, self._form, ended)
            nbytes = sum(map(len, buffers))
            self._record.status, self._record.sent = 200, nbytes
            if nbytes <= INLINE_BYTES:
                self._respond(measured, [b"".join(buffers)])
                return
            told = [part_at_once(self._front_end, buffer) for buffer in buffers]
            if None in told:
                self._copying = asyncio.get_running_loop().create_task(self._copy_and_respond(measured, buffers))
            else:
                self._respond_parts(measured, [part for part in told if part is not None])
        except Exception as error:
            self._refuse(error)

    async def _copy_and_respond(self, measured: Measured, buffers: Buffers) -> None:
        try:
            self._respond_parts(measured, [await part_of(self._front_end, buffer) for buffer in buffers])
        except Exception as error:
            self._refuse(error)

    def _respond_parts(self, measured: Measured, told: Sequence[tuple[bytes | messages.Part, object]]) -> None:
        self._held = [held for _, held in told]
        self._respond(measured, [part for part, _ in told])

    def _respond(self, measured: Measured, body: list[bytes | messages.Part]) -> None:
        media_type, shared = self._form.media_type, self._prepared.shared
        self._front_end.send(messages.Result(self._number, media_type, measured, shared, body))

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, NormserveError):
            known = error
            if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
                failures.note(error.detail, self._log_fields())
        else:
            fields = self._log_fields()
            log.error("unexpected error in a request", exc_info=error, extra={"fields": fields})
            known = unexpected(error)
        status, headers, body = problem(known, self._request_id)
        self._record.status, self._record.error, self._record.sent = status, known.code, len(body)
        named = [*headers, *self._prepared.shared, (b"x-request-id", self._request_id.encode())]
        self._front_end.send(messages.Send(self._number, status, named, body, more=False))

    def _log_fields(self) -> dict[str, str | None]:
        """Which request it is, and whose."""
        headers = self._prepared.headers
        if self._parts.spans is not None:
            self._parts.spans.decide(self._record, headers)
        named = log_fields(self._request_id, self._record.trace_id, headers)
        return {**named, "key": self._caller.key}


class Direct:
    """Finds out which requests can be answered so.

    Attributes:
        parts: what they are answered with.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def prepare(self, scope: Scope) -> Prepared | None:
        """What a header says; None where it is for the application."""
        operation = self.parts.operations.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return None
        headers = dict(scope["headers"])
        try:
            shared, preflight = self.parts.origins.admit(scope, headers)
            head = operation.read_head(scope["query_string"], headers)
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
        address = "unix" if request.client is None else request.client[0]
        keys = self.parts.keys
        if keys is None:
            return None, anonymous(address)
        grant = None if prepared.token is None else keys.find(prepared.token)
        if grant is None:
            return None, None
        try:
            grant.require_scope(_INFER, time.time())
        except NormserveError:
            return grant, None
        return grant, grant.caller(address)
