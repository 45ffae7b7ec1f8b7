"""Servers with a gateway, for attacks."""

import pytest

from tests.integration.harness.gateways import find_gateway_address
from tests.security.keys import write_keys


@pytest.fixture(scope="module")
def guarded(launched, tmp_path_factory):
    """A server with keys, whose gateway takes messages of 1 MiB, four at once."""
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    limits = ("--grpc-max-message-bytes", "1MiB", "--max-inflight-bytes", "4MiB")
    return launched("--grpc-port", "0", "--access-log", "--api-keys-file", str(keys), *limits)


@pytest.fixture(scope="module")
def address(guarded):
    return find_gateway_address(guarded)
