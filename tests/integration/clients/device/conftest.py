"""A server on a GPU that shares its memory, and clients of it."""

import pytest
from normserve.client import Client

from tests.integration.clients.device.serving import ONCE, START_S

MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("device") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    options = ("--local", str(path), "--local-device-bytes", str(512 * MIB), "--max-compiles-per-minute", "600")
    server = launched("--backend", "triton", *options, wait=False)
    server.wait_until_ready(START_S)
    return server


@pytest.fixture(scope="module")
def http(serving):
    with Client(serving.url, retries=ONCE) as client:
        yield client


@pytest.fixture
def local(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        yield client
