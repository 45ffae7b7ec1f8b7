"""Deny by default: every route, those of later included, without a key and with a key of each scope."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from normserve.http.app import create_app
from normserve.http.transport import AsgiAdapter
from normserve.jobs.job import LAYER_OPS, Op
from normserve.settings import Settings
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute

from tests.security.keys import EVERYTHING, EXPIRED, INFER, LAYERS, METRICS, bearing, write_keys

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
READS = {"GET", "HEAD"}

# What the contract says, written a second time and not taken from the code.
PUBLIC = {"/livez", "/readyz", "/", "/assets/{name}", "/docs", "/openapi.json", "/sample.npy"}
PUBLIC |= {"/v2/health/live", "/v2/health/ready"}
MODELS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
INFERRED = {("POST", f"{model}/infer") for model in MODELS}
COUNTED = {(method, f"{model}/stats") for model in ("/v2/models", *MODELS) for method in READS}
SHOWN = {(method, f"{model}{told}") for model in MODELS for told in ("", "/ready", "/config") for method in READS}
SHOWN |= {("POST", "/v2/repository/index")}
SHARED = {
    (method, f"/v2/{kind}sharedmemory{place}/{what}")
    for kind in ("system", "cuda")
    for place in ("", "/region/{region}")
    for method, what in (("GET", "status"), ("HEAD", "status"), ("POST", "unregister"), ("POST", "register"))
    if place or what != "register"
}
RELOADED = {("POST", f"/v2/repository/models/{{name}}/{change}") for change in ("load", "unload")}
INFORMATION = ("/v1/info", "/v2", "/v2/")
OPERATIONS = {f"/v1/{op.value}{way}" for op in LAYER_OPS for way in ("", "/backward")} | {"/v1/layer_norm_chain"}
MAY = {
    INFER: {("POST", path) for path in OPERATIONS}
    | INFERRED
    | COUNTED
    | SHOWN
    | SHARED
    | {(method, path) for method in READS for path in ("/v1/layers", "/v1/layers/{name}", *INFORMATION)},
    LAYERS: {(method, "/v1/layers/{name}") for method in ("PUT", "DELETE")}
    | RELOADED
    | SHOWN
    | {(method, path) for method in READS for path in ("/v1/layers", "/v1/layers/{name}", *INFORMATION)},
    METRICS: {(method, path) for method in READS for path in ("/metrics", *INFORMATION)} | COUNTED,
}


@pytest.fixture
def app(tmp_path) -> FastAPI:
    """The application, which is not started: whom it lets in says 503, or whatever the handler says."""
    return create_app(Settings(backend="torch", allowed_hosts="mounted.test", api_keys_file=write_keys(tmp_path)))


def ask(app: FastAPI, requests: list[tuple[str, str, str | None]]) -> list[httpx.Response]:
    """The answers to requests by method, path and key."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.request(method, path, headers=bearing(key), content=b"x" if method == "PUT" else None)
                for method, path, key in requests
            ]

    return asyncio.run(run())


def concrete(path: str) -> str:
    name = "live.js" if path.startswith("/assets") else "layer_norm" if path.startswith("/v2") else "a-layer"
    return path.replace("{name}", name).replace("{version}", "1").replace("{region}", "r")


def registered(app: FastAPI) -> list[BaseRoute]:
    return [route for route in app.router.routes if getattr(route, "path", None)]


def test_the_table_is_that_of_the_contract(app):
    """Whoever adds a route says here who may use it."""
    open_paths = {route.path for route in registered(app)} - {"/redoc", "/docs/oauth2-redirect"}
    assert open_paths == PUBLIC | {path for may in MAY.values() for _, path in may}
    assert len(OPERATIONS) == sum(len(op.passes) for op in Op)


# What FastAPI thinks of a route's methods GET and HEAD is of no matter here.
@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
@pytest.mark.parametrize("key", [None, "a-guess", EXPIRED])
def test_without_a_valid_key_only_what_is_public_answers(app, key):
    paths = [route.path for route in registered(app)]
    requests = [(method, concrete(path), key) for path in paths for method in METHODS]
    places = [(method, path) for path in paths for method in METHODS]
    for (method, path), answer in zip(places, ask(app, requests), strict=True):
        if path in PUBLIC and method in READS:
            assert answer.status_code in (200, 400 if path == "/v2/health/ready" else 503), (method, path)
        elif path in PUBLIC and method == "OPTIONS":
            # Proxies check by this method, unless told otherwise, whether a server is there.
            assert answer.status_code == 204, path
        else:
            assert answer.status_code == 401, (method, path)


@pytest.mark.parametrize("key", [INFER, LAYERS, METRICS])
def test_a_key_of_one_scope_opens_that_scope_alone(app, key):
    places = [
        (method, route.path)
        for route in registered(app)
        for method in METHODS
        if method in route.methods and route.path not in PUBLIC
    ]
    answers = ask(app, [(method, concrete(path), key) for method, path in places])
    for place, answer in zip(places, answers, strict=True):
        if place in MAY[key]:
            assert answer.status_code not in (401, 403), place
        else:
            assert answer.status_code == 403, place


def test_a_key_of_every_scope_opens_everything_that_is_declared(app):
    places = sorted(set.union(*MAY.values()))
    answers = ask(app, [(method, concrete(path), EVERYTHING) for method, path in places])
    assert not [place for place, answer in zip(places, answers, strict=True) if answer.status_code in (401, 403)]


def test_a_refusal_says_which_scope_is_missing(app):
    put, post, scrape = ask(
        app,
        [("PUT", "/v1/layers/a", INFER), ("POST", "/v1/layer_norm", METRICS), ("GET", "/metrics", INFER)],
    )
    assert "needs the scope layers" in put.json()["detail"]
    assert "needs the scope infer" in post.json()["detail"]
    assert "needs the scope metrics" in scrape.json()["detail"]
    assert {answer.json()["code"] for answer in (put, post, scrape)} == {"forbidden"}


def test_expired_is_said_of_a_known_key_only(app):
    known, unknown, absent = ask(app, [("GET", "/v1/info", key) for key in (EXPIRED, EXPIRED + "x", None)])
    assert "expired" in known.json()["detail"]
    assert "expired" not in unknown.json()["detail"] + absent.json()["detail"]
    for answer in (known, unknown, absent):
        assert answer.json()["code"] == "unauthorized"
        assert answer.headers["www-authenticate"].startswith("Bearer")


def secret(request: object) -> PlainTextResponse:
    return PlainTextResponse("secret")


def later_routes(app: FastAPI) -> None:
    """Every way in which somebody may add something later."""
    inner = FastAPI()
    inner.add_api_route("/data", lambda: "secret")
    app.mount("/mounted", inner)
    app.add_route("/plain", secret)
    app.add_api_route("/v1/later", lambda: "secret", methods=["GET", "POST"])
    app.host("mounted.test", inner)
    app.router.routes.insert(0, type(app.router.routes[0])("/v1/direct", secret, methods=["POST"]))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/mounted/data"),
        ("GET", "/plain"),
        ("GET", "/v1/later"),
        ("POST", "/v1/later"),
        ("POST", "/v1/direct"),
    ],
)
def test_what_is_added_without_a_scope_is_refused(app, method, path):
    later_routes(app)
    absent, known, other = ask(app, [(method, path, None), (method, path, EVERYTHING), ("GET", "/livez", None)])
    assert (absent.status_code, known.status_code, other.status_code) == (401, 403, 200)
    assert "secret" not in absent.text + known.text


def test_a_route_for_a_host_of_its_own_is_refused(app):
    later_routes(app)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance))
        async with httpx.AsyncClient(transport=transport, base_url="http://mounted.test") as client:
            return await client.get("/data", headers=bearing(EVERYTHING))

    assert asyncio.run(run()).status_code == 403


def test_what_nobody_knows_is_401_before_it_is_404(app):
    paths = ["/nope", "/v1/nope", "/v2/layer_norm", "/assets", "/assets/a/b", "/docs/nope"]
    assert {answer.status_code for answer in ask(app, [("GET", path, None) for path in paths])} == {401}
    assert {answer.status_code for answer in ask(app, [("GET", path, METRICS) for path in paths])} == {404}


def test_a_layer_of_any_name_needs_the_scope_of_layers(app):
    paths = ["/v1/layers/", "/v1/layers/a/b", "/v1/layers/a%2Fb", "/v1/layers/a%0A"]
    requests = [(method, path) for method in ("GET", "PUT", "DELETE") for path in paths]
    assert {answer.status_code for answer in ask(app, [(*each, METRICS) for each in requests])} == {403}


def test_below_a_root_path_no_route_is_taken_for_another(app):
    """Some servers put the application below a path, which the router strips and direct routes do not."""

    async def run(root: str, path: str, key: str) -> int:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance), root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post(path, headers=bearing(key))).status_code

    assert asyncio.run(run("/v1", "/v1/layer_norm", METRICS)) == 403
    assert asyncio.run(run("/v1", "/v1/v1/layer_norm", METRICS)) == 403
    assert asyncio.run(run("/norm", "/norm/v1/layer_norm", METRICS)) == 403
    assert asyncio.run(run("/norm", "/norm/v1/layer_norm", INFER)) not in (401, 403, 404)


def test_with_any_key_a_method_that_a_path_does_not_take_is_405(app):
    requests = [("PATCH", "/v1/layers/a", INFER), ("GET", "/v1/layer_norm", METRICS), ("POST", "/livez", LAYERS)]
    assert {answer.status_code for answer in ask(app, requests)} == {405}
    (options,) = ask(app, [("OPTIONS", "/v1/layers/a", METRICS)])
    assert options.status_code == 204
    assert options.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"


def test_a_websocket_is_refused(app):
    sent = []

    async def talk(socket: WebSocket) -> None:
        await socket.accept()

    app.add_api_websocket_route("/v1/talk", talk)

    async def run() -> None:
        async def send(message) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/v1/talk", "headers": [], "state": {}}
        await app.state.entrance(scope, None, send)

    asyncio.run(run())
    assert [message["type"] for message in sent] == ["websocket.close"]
