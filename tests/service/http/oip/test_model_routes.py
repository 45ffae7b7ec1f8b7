"""What a server says below `/v2` before it is ready; its application is made and not started."""

import asyncio

import httpx
import pytest
from normserve.http.app import create_app
from normserve.http.transport import AsgiAdapter
from normserve.settings import Settings


def ask(method: str, path: str, root_path: str = "") -> httpx.Response:
    app = create_app(Settings(backend="torch"))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance), root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 400),
        ("GET", "/v2/models/layer_norm/ready", 400),
        ("POST", "/v2/models/layer_norm/infer", 503),
    ],
)
def test_a_server_that_warms_up(method, path, status):
    answer = ask(method, path)
    assert answer.status_code == status
    if status != 200:
        assert answer.json() == {"error": "the server is still warming up"}
    assert ("retry-after" in answer.headers) == (status == 503)


def test_errors_follow_the_path_below_a_root():
    assert ask("GET", "/norm/v2/nothing", "/norm").json().keys() == {"error"}
    assert "detail" in ask("GET", "/norm/v1/nothing", "/norm").json()
