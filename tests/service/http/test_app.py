"""Whatever is raised in whichever route: the answer is a problem document, and says nothing of the error."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from normserve.errors import DeviceOutOfMemoryError, UnknownLayerError
from normserve.http.app import create_app
from normserve.http.direct_routes import DirectRoute
from normserve.http.transport import AsgiAdapter
from normserve.settings import Settings

from tests.integration.harness.wire import assert_problem

SECRET = "0x7f0123456789"


@pytest.fixture
def app():
    return create_app(Settings(backend="torch"))


def asked(app, method: str, path: str, **options) -> httpx.Response:
    """The answer of the whole application, its edge included."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def raising(error: BaseException):
    async def endpoint(request=None, name: str = "", version: str = ""):
        raise error

    return endpoint


UNEXPECTED = [
    RuntimeError(SECRET),
    AssertionError(SECRET),
    KeyError(SECRET),
    RecursionError(SECRET),
    OSError(28, SECRET),
    TimeoutError(SECRET),
    StopAsyncIteration(SECRET),
    ExceptionGroup(SECRET, [ValueError(SECRET)]),
]


def assert_internal(answer: httpx.Response) -> None:
    assert_problem(answer, 500, "internal")
    assert SECRET not in answer.text


@pytest.mark.parametrize("error", UNEXPECTED, ids=lambda error: type(error).__name__)
def test_an_error_that_nobody_expected(app, error):
    app.add_api_route("/raises", raising(error))
    assert_internal(asked(app, "GET", "/raises"))


def test_every_route_answers_with_a_problem(app, caplog):
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) > 10
    for route in routes:
        if isinstance(route, DirectRoute):
            route.endpoint = raising(RuntimeError(SECRET))
        else:
            route.dependant.call = raising(RuntimeError(SECRET))
        (method, *_) = route.methods - {"HEAD"}
        caplog.clear()
        answer = asked(app, method, route.path.replace("{name}", "a").replace("{version}", "1"))
        if route.path.startswith("/v2"):
            assert (answer.status_code, answer.json()) == (500, {"error": "internal error in the server"})
        else:
            assert_internal(answer)
        (logged,) = [each for each in caplog.records if each.name.startswith("normserve")]
        assert SECRET in str(logged.exc_info[1])


@pytest.mark.parametrize(
    ("status", "answered", "code"),
    [
        (400, 400, "malformed_payload"),
        (401, 401, "unauthorized"),
        (404, 404, "not_found"),
        (413, 413, "too_large"),
        (418, 500, "internal"),
        (422, 422, "invalid_parameter"),
        (503, 500, "internal"),
    ],
)
def test_what_the_framework_refuses_by_status(app, status, answered, code):
    app.add_api_route("/raises", raising(HTTPException(status, "no")))
    assert_problem(asked(app, "GET", "/raises"), answered, code)


def test_what_the_framework_finds_invalid(app):
    async def endpoint(count: int) -> None:
        raise AssertionError

    app.add_api_route("/takes", endpoint)
    refused = asked(app, "GET", "/takes", params={"count": SECRET})
    assert_problem(refused, 422, "invalid_parameter")
    assert "query.count" in refused.json()["detail"]
    assert SECRET not in refused.text


def test_a_body_that_the_framework_cannot_parse(app):
    async def endpoint(value: dict) -> None:
        raise AssertionError

    app.add_api_route("/takes", endpoint, methods=["POST"])
    refused = asked(app, "POST", "/takes", content=b"{", headers={"content-type": "application/json"})
    assert_problem(refused, 422, "invalid_parameter")


def test_an_error_of_the_tree_in_any_route(app):
    app.add_api_route("/one", raising(UnknownLayerError("no such layer")))
    app.add_api_route("/other", raising(DeviceOutOfMemoryError("none")))
    assert_problem(asked(app, "GET", "/one"), 404, "unknown_layer")
    assert_problem(asked(app, "GET", "/other"), 503, "device_out_of_memory")


def test_an_error_in_a_middleware(app):
    async def broken(scope, receive, send) -> None:
        raise RuntimeError(SECRET)

    app.add_middleware(lambda app: broken)
    assert_internal(asked(app, "GET", "/livez"))


@pytest.mark.parametrize("error", [RuntimeError(SECRET), DeviceOutOfMemoryError(SECRET)])
@pytest.mark.parametrize("route_class", [APIRoute, DirectRoute])
def test_an_answer_that_breaks_off_gets_no_second_one(error, route_class):
    async def pieces():
        yield b"first"
        raise error

    async def endpoint(request: Request):
        return StreamingResponse(pieces())

    router = APIRouter(route_class=route_class)
    router.add_api_route("/breaks", endpoint)
    app = create_app(Settings(backend="torch"))
    app.router.routes[:0] = router.routes
    said = []

    async def play() -> None:
        async def receive():
            await asyncio.Event().wait()

        async def send(message) -> None:
            said.append((message["type"], message.get("body"), message.get("more_body")))

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/breaks",
            "query_string": b"",
            "headers": [],
            "state": {},
        }
        await AsgiAdapter(app.state.entrance)(scope, receive, send)

    asyncio.run(play())
    # The server below closes the connection of an answer that was not ended.
    assert said == [("http.response.start", None, None), ("http.response.body", b"first", True)]


def played(app, method: str, path: str, send, during) -> None:
    """One request by hand, and what is seen while it lasts."""

    async def play() -> None:
        async def receive():
            await asyncio.Event().wait()

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "state": {}}
        request = asyncio.create_task(AsgiAdapter(app.state.entrance)(scope, receive, send))
        await during(request)

    asyncio.run(play())


async def ignore(message) -> None:
    pass


@pytest.mark.parametrize("ending", ["answered", "failed", "cancelled"])
def test_a_request_that_is_stuck_anywhere_is_noticed_until_it_ends(app, ending):
    service = app.state.service
    gate = asyncio.Event()

    async def stuck(name: str) -> None:
        await gate.wait()
        if ending == "failed":
            raise RuntimeError(SECRET)

    service.layer_changes.remove = stuck

    async def during(request: asyncio.Task) -> None:
        assert service.stall_detector.stalled_s == 0
        async with asyncio.timeout(20):
            while not service.stall_detector.stalled_s:
                await asyncio.sleep(0.001)
        if ending == "cancelled":
            request.cancel()
        gate.set()
        await asyncio.gather(request, return_exceptions=True)
        assert service.stall_detector.stalled_s == 0

    played(app, "DELETE", "/v1/layers/a", ignore, during)


def test_a_client_that_is_slow_to_read_is_no_stall(app):
    async def removed(name: str) -> None:
        pass

    app.state.service.layer_changes.remove = removed
    begun = asyncio.Event()

    async def send(message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def during(request: asyncio.Task) -> None:
        await begun.wait()
        await asyncio.sleep(0.005)
        assert app.state.service.stall_detector.stalled_s == 0
        request.cancel()

    played(app, "DELETE", "/v1/layers/a", send, during)


def test_want_of_memory_may_pass(app):
    route = next(each for each in app.state.routes if each.path == "/v1/info")
    route.app = None
    route.handle = _without_memory
    answer = asked(app, "GET", "/v1/info")
    assert_problem(answer, 503, "device_out_of_memory")
    assert answer.headers["retry-after"]


async def _without_memory(*_) -> None:
    raise MemoryError(SECRET)
