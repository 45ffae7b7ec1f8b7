"""One server for all tests of modules, and clients of each kind."""

import pytest
from normserve.client import RetryPolicy

from tests.integration.clients.torch_modules.pairs import Watched


@pytest.fixture(scope="module")
def urls(launched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    server = launched("--local", str(folder / "local.sock"), "--uds", str(folder / "http.sock"))
    return {
        "http": server.url,
        "http over a Unix socket": f"http+unix://{folder / 'http.sock'}",
        "shared memory": f"unix://{folder / 'local.sock'}",
    }


@pytest.fixture(params=["http", "http over a Unix socket", "shared memory"])
def client(request, urls):
    with Watched(urls[request.param], retries=RetryPolicy(tries=1)) as client:
        yield client


@pytest.fixture
def one(urls):
    """A client of one kind, for what is the same with all."""
    with Watched(urls["shared memory"], retries=RetryPolicy(tries=1)) as client:
        yield client
