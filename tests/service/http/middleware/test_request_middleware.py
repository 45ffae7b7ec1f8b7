"""What every request passes: its id, its key, its permit, its errors, and what is counted of it."""

import asyncio
import json
import logging
import re

import pytest
from normserve.admission.permits import AdmissionBudget
from normserve.engine.progress import CompletionTracker
from normserve.errors import (
    ClientLeftError,
    ConfigurationError,
    InvalidParameterError,
    OverloadedError,
    UnauthorizedError,
)
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.middleware.request_middleware import RequestMiddleware, parse_bearer_token
from normserve.http.routes.route_scopes import ANY_KEY, RouteScopes
from normserve.http.transport import AsgiAdapter
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import UNMATCHED
from normserve.requests.request_lifecycle import RequestServices

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


class Scene:
    """The edge around an application that a test writes.

    Attributes:
        sent: messages of the responses.
        records: what was counted.
        exchange: of the last request.
    """

    def __init__(self, app, *, origins=(), authorisation=None) -> None:
        self._app = app
        metrics = Metrics()
        self.records = []
        metrics.observe_request = self.records.append
        self.progress, self.limits = CompletionTracker(), AdmissionBudget(max_requests=4, max_bytes=1000)
        self.sent, self.received = [], []
        self.exchange = None
        services = RequestServices(None, self.limits, None, self.progress, metrics, 20_000)
        self.edge = RequestMiddleware(
            self._call,
            services,
            OriginPolicy(None, origins),
            RouteScopes([], metrics_are_public=True),
            authorisation,
        )

    async def _call(self, scope, receive, send):
        self.exchange = scope["state"]["exchange"]
        await self._app(self, scope, receive, send)

    def ask(self, *headers, path="/nowhere", method="POST", leaves=False, **more):
        """Send a request; the status, the headers and the body of what came."""

        async def receive():
            self.received.append(1)
            return {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"abc"}

        async def send(message):
            self.sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
            "scheme": "http",
            "state": {},
            **more,
        }
        self.sent.clear()
        asyncio.run(AsgiAdapter(self.edge)(scope, receive, send))
        starts = [each for each in self.sent if each["type"] == "http.response.start"]
        assert len(starts) == 1, "a request has one response"
        body = b"".join(bytes(each.get("body", b"")) for each in self.sent)
        return starts[0]["status"], dict(starts[0]["headers"]), body


async def answers(scene, scope, receive, send):
    await send(START)
    await send({"type": "http.response.body", "body": b"a result", "more_body": True})
    await send({"type": "http.response.body", "body": b", whole"})


def raising(error, *, begun=False):
    async def app(scene, scope, receive, send):
        if begun:
            await send(START)
        raise error

    return app


def test_refusal_is_sent_before_the_body_is_received():
    """Whoever has the connection sees to the rest of the body."""
    scene = Scene(raising(InvalidParameterError("wrong")))
    assert scene.ask((b"content-length", b"1000"))[0] == 422
    assert not scene.received


def test_nothing_is_served_on_websockets():
    scene, sent = Scene(answers), []

    async def send(message):
        sent.append(message)

    asyncio.run(scene.edge({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert [(each["type"], each["code"]) for each in sent] == [("websocket.close", 1008)]
    assert scene.exchange is None


def test_the_start_and_the_end_of_the_process_are_the_applications():
    told = []

    async def app(scope, receive, send):
        told.append((scope["type"], await receive()))

    async def receive():
        return "startup"

    edge = RequestMiddleware(app, Metrics(), CompletionTracker(), OriginPolicy(None))
    asyncio.run(edge({"type": "lifespan"}, receive, None))
    assert told == [("lifespan", "startup")]


@pytest.mark.parametrize("given", [b"a", b"A.b_c~d+e/f=g:h-1", b"x" * 128])
@pytest.mark.parametrize("app", [answers, raising(InvalidParameterError("wrong"))])
def test_a_request_keeps_the_id_that_it_came_with(app, given):
    _, headers, body = Scene(app).ask((b"x-request-id", given))
    assert headers[b"x-request-id"] == given
    if headers[b"content-type"] != b"text/plain":
        assert json.loads(body)["request_id"] == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\nb", b"<a>", b"a\xff", b'a"'])
def test_an_id_that_could_be_something_else_is_replaced(given):
    scene = Scene(answers)
    ids = {scene.ask((b"x-request-id", given))[1][b"x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch(rb"[0-9a-f]{32}", each) for each in ids)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bEARER abc", b"abc"),
        (b"Bearer   abc ", b"abc"),
        (b"Bearer a b", b"a b"),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"Basic abc", None),
        (b"abc", None),
        (b"", None),
    ],
)
def test_a_key_is_a_bearer_token(header, token):
    assert parse_bearer_token({b"authorization": header}) == token
    assert parse_bearer_token({}) is None


@pytest.mark.parametrize("is_allowed", [True, False])
def test_who_may_not_does_not_get_to_the_application(is_allowed):
    class Authorisation:
        asked = ()

        def authorise_request(self, exchange, token, needed, method, path):
            self.asked = token, needed, method, path
            if not is_allowed:
                raise UnauthorizedError("no")

    authorisation = Authorisation()
    scene = Scene(answers, authorisation=authorisation)
    status, headers, _ = scene.ask((b"authorization", b"Bearer abc"))
    assert authorisation.asked == (b"abc", ANY_KEY, "POST", "/nowhere")
    assert status == (200 if is_allowed else 401)
    assert (scene.exchange is None) != is_allowed
    assert (b"www-authenticate" in headers) != is_allowed
    authorisation.asked = ()
    assert scene.ask((b"authorization", b"Bearer abc"), path="/livez", method="GET")[0] == 200
    assert not authorisation.asked


@pytest.mark.parametrize(
    "ends",
    [
        answers,
        raising(InvalidParameterError("wrong")),
        raising(ConfigurationError("wrong")),
        raising(ValueError("unexpected")),
        raising(InvalidParameterError("wrong"), begun=True),
        raising(ValueError("unexpected"), begun=True),
    ],
)
def test_however_a_request_ends_its_permit_is_given_back_and_its_work_is_over(ends):
    async def app(scene, scope, receive, send):
        exchange = scope["state"]["exchange"]
        exchange.permit = scene.limits.acquire(100)
        exchange.mark_in_progress()
        assert not scene.progress.is_idle
        await ends(scene, scope, receive, send)

    scene = Scene(app)
    scene.ask()
    assert (scene.limits.request_count, scene.limits.used_bytes) == (0, 0)
    assert scene.progress.is_idle
    assert scene.progress.stalled_s == 0
    assert len(scene.records) == 1


def test_work_is_over_when_the_response_begins():
    async def app(scene, scope, receive, send):
        scope["state"]["exchange"].mark_in_progress()
        await send(START)
        assert scene.progress.is_idle
        await send({"type": "http.response.body", "body": b""})

    assert Scene(app).ask()[0] == 200


def test_what_is_sent_is_counted():
    scene = Scene(answers)
    assert scene.ask()[2] == b"a result, whole"
    (record,) = scene.records
    assert (record.status, record.sent_bytes, record.error_code, record.op, record.transport) == (
        200,
        15,
        None,
        "docs",
        "tcp",
    )


def test_a_whole_response_is_counted_and_has_the_headers_of_all():
    async def app(scene, scope, receive, send):
        exchange = scope["state"]["exchange"]
        exchange.mark_in_progress()
        exchange.record.op = "layer_norm"
        exchange.record.stage_seconds["kernel"] = 0.5
        await exchange.send_response(201, [(b"a", b"b")], [b"abc", b"de"], 5)
        assert scene.progress.is_idle

    scene = Scene(app, origins=["http://page.example"])
    status, headers, body = scene.ask((b"origin", b"http://page.example"), (b"x-request-id", b"asked"))
    assert (status, headers[b"a"], headers[b"x-request-id"], body) == (201, b"b", b"asked", b"abcde")
    assert headers[b"access-control-allow-origin"] == b"http://page.example"
    (record,) = scene.records
    assert (record.status, record.sent_bytes, record.op) == (201, 5, "layer_norm")
    assert record.stage_seconds["send"] >= 0


@pytest.mark.parametrize(
    ("app", "op"),
    [(answers, "docs"), (raising(InvalidParameterError("wrong")), UNMATCHED)],
)
def test_only_what_is_found_is_a_document(app, op):
    scene = Scene(app)
    scene.ask()
    assert scene.records[0].op == op


def test_a_client_that_leaves_is_counted_as_gone():
    async def app(scene, scope, receive, send):
        assert (await receive())["type"] == "http.disconnect"
        await answers(scene, scope, receive, send)

    scene = Scene(app)
    scene.ask(leaves=True)
    assert scene.records[0].status == 499
    scene = Scene(raising(ClientLeftError("gone")))
    scene.ask()
    assert (scene.records[0].status, scene.records[0].error_code) == (499, "client_left")


def test_a_response_that_breaks_off_is_counted_as_not_delivered_with_its_error():
    scene = Scene(raising(OverloadedError("later", 1.0), begun=True))
    assert scene.ask()[2] == b""
    assert (scene.records[0].status, scene.records[0].error_code) == (499, "overloaded")


def test_errors_are_told_to_pages_too():
    scene = Scene(raising(OverloadedError("later", 7.0)), origins=["http://page.example"])
    status, headers, body = scene.ask((b"origin", b"http://page.example"))
    assert (status, headers[b"retry-after"]) == (429, b"7")
    assert headers[b"access-control-allow-origin"] == b"http://page.example"
    assert json.loads(body)["detail"] == "later"
    assert (scene.records[0].status, scene.records[0].sent_bytes) == (429, len(body))


def test_a_page_that_asks_whether_it_may_is_answered_without_the_application():
    scene = Scene(answers, origins=["http://page.example"])
    status, _, _ = scene.ask(
        (b"origin", b"http://page.example"), (b"access-control-request-method", b"POST"), method="OPTIONS"
    )
    assert status == 200
    assert scene.exchange is None
    assert [record.op for record in scene.records] == ["preflight"]


@pytest.mark.parametrize(
    ("error", "logger"),
    [
        (InvalidParameterError("wrong"), None),
        (OverloadedError("later", 1.0), None),
        (ConfigurationError("it is wrong"), "normserve.failures"),
        (ValueError("unexpected"), "normserve.requests.request_lifecycle"),
    ],
)
def test_errors_of_the_server_are_logged_with_the_request_s_id(error, logger, caplog):
    caplog.set_level(logging.INFO)
    Scene(raising(error)).ask((b"x-request-id", b"asked"))
    found = [record for record in caplog.records if record.name.startswith("normserve")]
    assert [record.name for record in found] == ([] if logger is None else [logger])
    assert all(record.fields["request_id"] == "asked" and record.fields["key"] is None for record in found)


def test_paths_are_those_below_the_servers_own():
    scene = Scene(answers)
    scene.ask(path="/below/v1/info", root_path="/below")
    assert scene.exchange.path == "/v1/info"
    scene.ask(path="/v1/info", root_path="")
    assert scene.exchange.path == "/v1/info"
