"""A server that shares memory, and clients of it."""

import pytest
from normserve.client import Client

from tests.service.client.harness.plain_numpy import plain_numpy

__all__ = ["plain_numpy"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("local") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    return launched("--local", str(path), "--local-bytes", str(2**28))


@pytest.fixture(scope="module")
def http(serving):
    with Client(serving.url) as client:
        yield client


@pytest.fixture(scope="module")
def local(serving, path):
    with Client(f"unix://{path}") as client:
        yield client
