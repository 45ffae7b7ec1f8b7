"""The outermost layer of the application, which processes every request.

It assigns request ids, checks the API key, turns errors into problem documents, accounts for each request, and
logs an audit event for each change of a registered layer.
"""

import random
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from normserve.admission.client_identity import ClientIdentity
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.errors import ClientLeftError, NormserveError
from normserve.http.http_exchange import HttpExchange
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.problem_responses import make_problem_response
from normserve.http.routes.route_scopes import PUBLIC, RouteScopes
from normserve.http.transport import Buffers, Headers
from normserve.logs import audit
from normserve.metrics.request_metrics import GRPC_TRANSPORT, UNMATCHED, RequestRecord
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.request_lifecycle import RequestServices

LAYERS = "layers"
"""The `op` in the record of a request to a route of layers."""

# Results by method and status: PUT registers, DELETE removes, POST unloads (`/v2`).
_RESULTS = {
    "PUT": {200: "replaced", 201: "registered"},
    "DELETE": {204: "removed"},
    "POST": {200: "removed"},
}

# More than any IPv6 address in text has.
_LONGEST_ADDRESS = 64

_SANE_ID = re.compile(rb"[A-Za-z0-9._~+/=:-]{1,128}")

_names = random.Random()


class RequestMiddleware:
    """The outermost ASGI application: checks hosts, origins and keys, sends errors, and records requests."""

    def __init__(
        self,
        app: ASGIApp,
        services: RequestServices,
        origins: OriginPolicy,
        scopes: RouteScopes,
        authorisation: KeyAuthorisation | None = None,
    ) -> None:
        """Args:
        origins: decides about the hosts and origins that requests name.
        scopes: the scopes that each route requires of a key.
        authorisation: None if no keys are required.
        """
        self._app = app
        self._services = services
        self._origin_policy = origins
        self._scopes = scopes
        self._key_authorisation = authorisation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # Nothing is served on WebSockets, and no key would be required there.
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        exchange = self._make_exchange(scope, headers)
        scope["state"]["exchange"] = exchange
        outgoing = _ResponseRecorder(send, exchange)

        async def receive_body() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.is_client_disconnected = True
            return message

        exchange.send_response = outgoing.send_response
        try:
            outgoing.cors_headers, preflight = self._origin_policy.check_request(scope, headers)
            if preflight is None:
                self._authorise(exchange)
                await self._app(scope, receive_body, outgoing.forward_message)
            else:
                exchange.record.op = "preflight"
                await preflight(scope, receive_body, outgoing.forward_message)
        except Exception as error:
            await outgoing.send_problem(exchange.log_and_convert_error(error))
        finally:
            self._finish_exchange(exchange, outgoing)

    def _make_exchange(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpExchange:
        """Make the exchange of a request, with its id and a new record; the sender is known by address only, not
        yet by key.
        """
        client = scope["client"]
        transport, address = ("unix", "unix") if client is None else ("tcp", client[0])
        if (caller := headers.get(GATEWAY_CALLER)) is not None:
            transport, address = GRPC_TRANSPORT, caller.decode("latin-1")[:_LONGEST_ADDRESS]
        record = RequestRecord(transport=transport, began_at=scope["state"]["reception"].began_at)
        request_id = choose_request_id(headers)
        return HttpExchange(
            self._services,
            request_id,
            headers,
            ClientIdentity(address),
            record,
            scope,
            self._scopes.find_route_template,
        )

    def _authorise(self, exchange: HttpExchange) -> None:
        """Check that the request's API key allows its route, and record the key as the sender.

        Raises:
            NormserveError: the key is missing, unknown or not sufficient, or its rate limit is exceeded.
        """
        if self._key_authorisation is None:
            return
        scope = exchange.scope
        needed = self._scopes.find_accepted_scopes(scope)
        if needed != PUBLIC:
            token = parse_bearer_token(exchange.headers)
            self._key_authorisation.authorise_request(exchange, token, needed, scope["method"], scope["path"])

    def _finish_exchange(self, exchange: HttpExchange, outgoing: "_ResponseRecorder") -> None:
        """Complete the request's record and report it; for a layer change, also write an audit log entry."""
        record = exchange.record
        record.received_bytes = exchange.incoming_body.received_bytes
        if outgoing.has_started:
            sender = exchange.response_sender
            record.record_sent(sender.send_s, sender.ended_at, is_relayed=sender.is_relayed)
        if record.op == UNMATCHED and record.status < 400:
            record.op = "docs"
        if record.op == LAYERS:
            _audit_layer_change(exchange.scope, exchange)
        exchange.finish_request(
            is_delivered=bool(exchange.response_sender.is_delivered) and not exchange.is_client_disconnected
        )


def _audit_layer_change(scope: Scope, exchange: HttpExchange) -> None:
    """Write an audit log entry for a finished request that was to register or remove a layer.

    Requests with other methods are ignored.
    """
    results = _RESULTS.get(scope["method"])
    if results is None:
        return
    record = exchange.record
    audit.log_layer_change(
        scope["method"],
        scope["path"],
        record.error_code or results.get(record.status, "interrupted"),
        key=exchange.client_identity.key,
        address=exchange.client_identity.address,
        **exchange.log_fields,
    )


async def send_problem(error: NormserveError, exchange: HttpExchange, send: Send) -> None:
    """Send an error's problem document as the response, and note the error in the request's record."""
    exchange.record.error_code = error.code
    if isinstance(error, ClientLeftError):
        exchange.is_client_disconnected = True
    status, headers, body = make_problem_response(error, exchange.request_id, exchange.path)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _ResponseRecorder:
    """Sends a response with the headers that all responses have, and records its status and size.

    Attributes:
        cors_headers: headers for the web page that sent the request, if a page did.
    """

    def __init__(self, send: Send, exchange: HttpExchange) -> None:
        self._send = send
        self._exchange = exchange
        self.has_started = False
        self.cors_headers: Headers = ()

    async def send_response(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        """Send a complete response to a request whose body has been received completely.

        Raises:
            MemoryError: there is no memory to send from; an error can still be sent.
        """
        exchange = self._exchange
        self.has_started = True
        exchange.mark_processed()
        exchange.record.status = status
        exchange.record.sent_bytes = nbytes
        named = (*headers, *self.cors_headers, (b"x-request-id", exchange.request_id.encode()))
        try:
            await exchange.response_sender.send_response(status, named, buffers, nbytes)
        except Exception:
            if not exchange.response_sender.has_started:
                self.has_started, exchange.record.sent_bytes = False, 0
            raise

    async def send_problem(self, error: NormserveError) -> None:
        """Send an error response; if a response has already begun, only record the error."""
        if not self.has_started:
            await send_problem(error, self._exchange, self.forward_message)
            return
        self._exchange.record.error_code = error.code
        self._exchange.is_client_disconnected |= isinstance(error, ClientLeftError)

    async def forward_message(self, message: Message) -> None:
        """Forward an ASGI message of a response, and count its body bytes."""
        if message["type"] == "http.response.start":
            await self._send_start(message)
            return
        self._exchange.record.sent_bytes += len(message.get("body", b""))
        await self._send(message)

    async def _send_start(self, message: Message) -> None:
        """Forward the start of a response with the common headers, and record the status.

        The request no longer counts as in progress.
        """
        self.has_started = True
        self._exchange.mark_processed()
        self._exchange.record.status = message["status"]
        named = (b"x-request-id", self._exchange.request_id.encode())
        await self._send({**message, "headers": [*message["headers"], *self.cors_headers, named]})


def parse_bearer_token(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the token of `Authorization: Bearer TOKEN`; None without such a header."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip(b" ") or None if scheme.lower() == b"bearer" else None


def choose_request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the request id that the client sent, if it is valid, else a random one."""
    given = headers.get(b"x-request-id", b"")
    if given and _SANE_ID.fullmatch(given):
        return given.decode()
    # Ids are no secrets, so the system's random source, a system call for each id, is not needed.
    return f"{_names.getrandbits(128):032x}"
