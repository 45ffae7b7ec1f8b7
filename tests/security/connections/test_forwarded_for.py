"""X-Forwarded-For: nobody but a trusted proxy decides to which address a request is charged."""

import contextlib
import re
import uuid

import pytest
import tritonclient.grpc as triton

from tests.integration.harness.gateways import find_gateway_address
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import X, npy
from tests.security.test_admission import CHUNKED, From, Metrics

#: A trusted proxy, and a client that is none; both are addresses of this host.
PROXY, STRANGER = "127.0.0.2", "127.0.0.3"
#: One whose connections may still be counted when the next test begins.
HOARDER = "127.0.0.4"
CLIENT, NEIGHBOUR = "203.0.113.5", "2001:db8::6"
MAX_REQUESTS, MAX_CONNECTIONS = 8, 4
BODY = npy(X)
OPTIONS = ("--access-log", "--grpc-port", "0")
LIMITS = ("--max-inflight-requests", str(MAX_REQUESTS), "--max-connections-per-address", str(MAX_CONNECTIONS))


@pytest.fixture(scope="module", params=[(), ("--frontends", "2")], ids=["one process", "front ends"])
def trusting(launched, request):
    return launched("--trusted-proxies", f"{PROXY},10.0.0.0/8", *OPTIONS, *LIMITS, *request.param)


@pytest.fixture(scope="module", params=[(), ("--frontends", "2")], ids=["one process", "front ends"])
def untrusting(launched, request):
    return launched(*OPTIONS, *request.param)


def post(*forwarded: str, request_id: str = "any") -> bytes:
    named = [f"X-Forwarded-For: {each}" for each in forwarded]
    length = f"Content-Length: {len(BODY)}"
    return head("/v1/layer_norm", length, f"X-Request-ID: {request_id}", *named) + BODY


def find_logged_address(server, until, request_id: str) -> str:
    """The address in the access log's last line about a request."""
    found: list[str] = []

    def has_come() -> bool:
        found[:] = re.findall(rf"normserve\.access: .* address=(\S+) .* request_id={request_id}\s", server.log)
        return bool(found)

    until(has_come)
    return found[-1]


def charge(server, until, source: str, *forwarded: str) -> str:
    """The address that a request is charged to."""
    request_id = uuid.uuid4().hex
    with From(source, server.address) as connection:
        # The second is known by the bytes of its header, and is not parsed.
        for _ in range(2):
            connection.sendall(post(*forwarded, request_id=request_id))
            assert connection.answer().status_code == 200
    until(lambda: server.log.count(request_id) == 2)
    return find_logged_address(server, until, request_id)


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ((), PROXY),
        ((CLIENT,), CLIENT),
        ((NEIGHBOUR,), NEIGHBOUR),
        ((f"127.0.0.1, {CLIENT}, 10.1.1.1",), CLIENT),
        (("127.0.0.1", CLIENT), CLIENT),
        (("unix",), "unknown"),
    ],
)
def test_a_trusted_proxy_names_the_client(trusting, until, forwarded, address):
    assert charge(trusting, until, PROXY, *forwarded) == address


def test_clients_of_one_connection_are_told_apart(trusting, until):
    with From(PROXY, trusting.address) as connection:
        for address in (CLIENT, NEIGHBOUR, CLIENT):
            request_id = uuid.uuid4().hex
            connection.sendall(post(address, request_id=request_id))
            assert connection.answer().status_code == 200
            assert find_logged_address(trusting, until, request_id) == address


def test_nobody_else_is_believed(trusting, until):
    assert charge(trusting, until, STRANGER, CLIENT) == STRANGER


@pytest.mark.parametrize("source", [PROXY, STRANGER, "127.0.0.1"])
def test_without_the_setting_nobody_is_believed(untrusting, until, source):
    assert charge(untrusting, until, source, CLIENT) == source


def test_a_proxys_clients_have_shares_of_their_own(trusting, until):
    with trusting.client() as api, contextlib.ExitStack() as stack:
        metrics = Metrics(api)
        for _ in range(MAX_REQUESTS):
            silent = stack.enter_context(From(PROXY, trusting.address))
            silent.sendall(CHUNKED.replace(b"\r\n\r\n", f"\r\nX-Forwarded-For: {CLIENT}\r\n\r\n".encode()))
        until(lambda: metrics["inflight_requests"] == MAX_REQUESTS)
        revoked = metrics['revoked_total{reason="share"}']
        with From(PROXY, trusting.address) as other:
            other.sendall(post(NEIGHBOUR))
            assert other.answer().status_code == 200
        assert metrics['revoked_total{reason="share"}'] > revoked
    with trusting.client() as api:
        until(Metrics(api).nothing_is_held)


def test_a_proxys_connections_have_no_limit_of_an_address(trusting):
    def open_busy(source: str) -> Connection:
        connection = stack.enter_context(From(source, trusting.address))
        connection.sendall(b"POST")
        return connection

    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            last = open_busy(PROXY)
        last.sendall(post(CLIENT)[len(b"POST") :])
        assert last.answer().status_code == 200
        for _ in range(MAX_CONNECTIONS):
            open_busy(HOARDER)
        beyond = open_busy(HOARDER)
        beyond.sendall(post()[len(b"POST") :])
        assert beyond.answer().status_code == 503


def call(server, **headers: str) -> None:
    given = triton.InferInput("x", list(X.shape), "FP32")
    given.set_data_from_numpy(X)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with triton.InferenceServerClient(find_gateway_address(server)) as client:
        client.infer("layer_norm", [given], headers=named)


def test_a_caller_of_grpc_that_is_no_proxy_is_not_believed(trusting, until):
    request_id = uuid.uuid4().hex
    call(trusting, x_request_id=request_id, x_forwarded_for=CLIENT)
    assert find_logged_address(trusting, until, request_id) == "127.0.0.1"


def test_a_caller_of_grpc_is_named_by_a_trusted_proxy(launched, until):
    server = launched("--trusted-proxies", "127.0.0.1", *OPTIONS)
    request_id = uuid.uuid4().hex
    call(server, x_request_id=request_id, x_forwarded_for=f"{NEIGHBOUR}, {CLIENT}")
    assert find_logged_address(server, until, request_id) == CLIENT
