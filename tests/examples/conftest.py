"""One server that the programs and snippets call, over HTTP and shared memory."""

from tests.integration.harness.servers import launched

__all__ = ["launched"]

import pytest


@pytest.fixture(scope="module")
def socket(tmp_path_factory):
    return tmp_path_factory.mktemp("examples") / "normserve.sock"


@pytest.fixture(scope="module")
def url(launched, socket):
    return launched("--local", str(socket)).url
