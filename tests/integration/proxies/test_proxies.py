"""What docs/proxies.md says of nginx, HAProxy and Caddy is so."""

import http.client
import re
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.harness.wire import NPY, from_npy, npy

SMALL = npy(np.ones((4, 8), np.float32))
TYPE = {"Content-Type": NPY}
LARGE_SHAPE = (16384, 1024)


@pytest.fixture
def connection(proxy):
    _, port = proxy
    connected = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=("127.0.0.9", 0))
    yield connected
    connected.close()


def post(connection, body, path="/v1/layer_norm", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, {**TYPE, **named}, encode_chunked="Transfer-Encoding" in named)
    response = connection.getresponse()
    return response, response.read()


def assert_normalised(body: bytes, x: np.ndarray) -> None:
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x), x.shape[-1:])
    torch.testing.assert_close(torch.from_numpy(from_npy(body)), expected, atol=1e-5, rtol=1e-5)


def test_a_body_of_64_mib_is_forwarded_and_its_result_is_whole(connection):
    x = np.random.default_rng(1).standard_normal(LARGE_SHAPE, np.float32)
    response, body = post(connection, npy(x))
    assert response.status == 200
    assert_normalised(body, x)


def test_a_body_of_unknown_length_is_forwarded(connection):
    x = np.random.default_rng(2).standard_normal((512, 1024), np.float32)
    whole = npy(x)
    pieces = (whole[start : start + 65536] for start in range(0, len(whole), 65536))
    response, body = post(connection, pieces, Transfer_Encoding="chunked")
    assert response.status == 200
    assert_normalised(body, x)


def list_closed_connections(ports: list[int]) -> set[tuple[str, str]]:
    """Both addresses of the connections from or to some ports that have ended lately (TIME_WAIT)."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    ended = {(line.split()[1], line.split()[2]) for line in lines if line.split()[3] == "06"}
    return {pair for pair in ended if any(int(each.rpartition(":")[2], 16) in ports for each in pair)}


def test_connections_are_used_again(connection, proxy, servers):
    ports = [proxy[1], *(server.address[1] for server in servers)]
    post(connection, SMALL)
    kept, before = connection.sock, list_closed_connections(ports)
    for _ in range(20):
        response, _ = post(connection, SMALL)
        assert response.status == 200
        assert connection.sock is kept
    # Health checks have connections of their own, one a second to each server.
    assert len(list_closed_connections(ports) - before) < 15


def find_logged_address(servers, request_id: str) -> list[str]:
    pattern = rf"normserve\.access: .* address=(\S+) .* request_id={request_id}\s"
    return [found for server in servers for found in re.findall(pattern, server.log)]


@pytest.mark.parametrize("forged", ["", "203.0.113.5", "127.0.0.1"])
def test_the_server_learns_the_clients_address(connection, servers, until, forged):
    request_id = uuid.uuid4().hex
    headers = {"X_Forwarded_For": forged} if forged else {}
    response, _ = post(connection, SMALL, X_Request_ID=request_id, **headers)
    assert response.status == 200
    until(lambda: find_logged_address(servers, request_id))
    assert find_logged_address(servers, request_id) == ["127.0.0.9"]


@pytest.mark.parametrize(
    ("host", "status"), [("norm.example", 200), ("NORM.example:8080", 200), ("other.example", 421)]
)
def test_the_host_is_passed_on(connection, host, status):
    connection.request("GET", "/v1/info", headers={"Host": host})
    assert connection.getresponse().status == status


def test_an_error_reaches_a_client_that_still_sends(connection, proxy):
    if proxy[0] == "caddyfile":
        pytest.skip("Caddy 2.6.2 ends the connection, as the document says")
    response, body = post(connection, npy(np.ones(LARGE_SHAPE, np.float32)), "/v1/layer_norm?eps=-1")
    assert response.status == 422
    assert b'"invalid_parameter"' in body
