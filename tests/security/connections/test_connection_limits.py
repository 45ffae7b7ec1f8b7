"""More connections than may be open: idle ones give way, probes are answered, and the others are told so."""

import contextlib
import os
import re
import resource
import signal
import socket
import time

import pytest

from tests.integration.harness.raw import Connection, exchange, head
from tests.integration.harness.wire import assert_alive, assert_problem

PROBES = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics")
LIVEZ, INFO = (f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in ("/livez", "/v1/info"))
# A request that is not complete, on a connection that is therefore not idle.
BEGUN = head("/v1/layer_norm", "Content-Length: 1000")


def asks(connection: socket.socket, request: bytes = LIVEZ) -> int:
    """The status of one request on it."""
    connection.sendall(request)
    return int(connection.recv(65536).split(b" ")[1])


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def refused(api, reason: str) -> float:
    """How many connections were refused for that reason, by all processes."""
    pattern = re.compile(rf'normserve_connections_refused_total{{(process="\d",)?reason="{reason}"}}')
    return sum(value for name, value in samples(api).items() if pattern.fullmatch(name))


def connections(api) -> float:
    """How many are open, at all processes."""
    pattern = re.compile(r'normserve_connections({process="\d"})?')
    return sum(value for name, value in samples(api).items() if pattern.fullmatch(name))


OPTIONS = ("--max-connections", "6", "--max-connections-per-address", "4", "--header-timeout-s", "60")
PROCESSES = {"one": (), "fleet": ("--devices", "cpu,cpu"), "front ends": ("--frontends", "2")}


@pytest.fixture(scope="module", params=PROCESSES)
def limited(request, launched, tmp_path_factory):
    """A server with few connections, at a port and at a Unix socket, and the path of that."""
    path = tmp_path_factory.mktemp("uds") / "socket"
    return launched(*OPTIONS, "--uds", str(path), *PROCESSES[request.param]), path


def unix(path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(path))
    return connection


def is_served(server) -> bool:
    """Whether a new connection is, and not for a probe only."""
    with contextlib.suppress(OSError, IndexError), Connection(server.address) as connection:
        return asks(connection, INFO) == 200
    return False


def opened(server, path, stack: contextlib.ExitStack, until) -> list[socket.socket]:
    """As many connections as there may be; the end of earlier ones may be noticed only now."""

    def are_inside() -> bool:
        attempt.close()
        connections.clear()
        for connect in [lambda: Connection(server.address)] * 4 + [lambda: unix(path)] * 2:
            connections.append(attempt.enter_context(connect()))
            # Each is accepted before the next one, so that several processes have as many of each address.
            if asks(connections[-1], INFO) != 200:
                return False
        return True

    connections: list[socket.socket] = []
    attempt = stack.enter_context(contextlib.ExitStack())
    until(are_inside)
    return connections


def test_limits_of_connections(limited, until):
    server, path = limited
    with contextlib.ExitStack() as stack:
        connections_of = opened(server, path, stack, until)
        for connection in connections_of:
            connection.sendall(BEGUN)
        # From one address no more.
        for _ in range(20):
            answer = exchange(server.address, INFO)
            assert_problem(answer, 503, "too_many_connections")
            assert answer.headers["retry-after"] == "1"
        # From all of them no more.
        late = stack.enter_context(unix(path))
        late.sendall(INFO)
        assert late.recv(65536).startswith(b"HTTP/1.1 503")
        assert late.recv(65536) == b""
        assert [asks(connection, bytes(1000)) for connection in connections_of] == [415] * 6
    until(lambda: is_served(server))
    with server.client() as api:
        assert refused(api, "max_connections_per_address") >= 20
        assert refused(api, "max_connections") >= 1
        # A process that is asked for its metrics by another is a client of that one, too.
        until(lambda: 1 <= connections(api) <= 2)
    lines = [line for line in server.log.splitlines() if "a connection is beyond the limit" in line]
    assert 1 <= len(lines) < 15


def test_probes_are_answered_while_all_connections_are_busy(limited, until):
    server, path = limited
    with contextlib.ExitStack() as stack:
        for connection in opened(server, path, stack, until):
            connection.sendall(BEGUN)
        for probe in PROBES * 4:
            answer = exchange(server.address, LIVEZ.replace(b"/livez", probe.encode()))
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
    until(lambda: is_served(server))


def test_idle_connections_give_way(limited, until):
    """Those of the address that has too many, in the process that gets the new one."""
    server, path = limited
    with contextlib.ExitStack() as stack:
        *idle, user, _ = opened(server, path, stack, until)
        # One that was used just now is not idle.
        time.sleep(1.2)
        busy = [stack.enter_context(Connection(server.address)) for _ in range(4)]
        for connection in busy:
            connection.sendall(BEGUN)
        assert [connection.recv(1) for connection in idle] == [b""] * 4
        assert asks(user) == 200
        assert [asks(connection, bytes(1000)) for connection in busy] == [415] * 4
    until(lambda: is_served(server))


def test_silent_connections_starve_no_probe(limited, until):
    """As many as there are places for, those for probes included."""
    server, _ = limited

    def is_alive() -> bool:
        with contextlib.suppress(OSError, IndexError), Connection(server.address) as connection:
            return asks(connection) == 200
        return False

    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(Connection(server.address))
        until(is_alive, 10)
    until(lambda: is_served(server))


def test_refusal_beyond_the_limits_is_there_after_a_body(limited, until):
    server, path = limited
    with contextlib.ExitStack() as stack:
        for connection in opened(server, path, stack, until):
            connection.sendall(BEGUN)
        late = stack.enter_context(Connection(server.address))
        late.sendall(head("/v1/layer_norm", "Content-Length: 1000000") + bytes(1_000_000))
        assert_problem(late.answer(), 503, "too_many_connections")
    until(lambda: is_served(server))


def test_probes_have_a_reserve_over_tls(launched, ours):
    server = launched(*OPTIONS, *ours.options())

    def connect():
        plain = stack.enter_context(Connection(server.address))
        return stack.enter_context(ours.trust().wrap_socket(plain, server_hostname="localhost"))

    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connect().sendall(BEGUN)
        for _ in range(5):
            assert asks(connect()) == 200
            assert asks(connect(), INFO) == 503


def test_room_of_a_process_that_dies_is_given_back(limited, until):
    server, _ = limited
    with server.client() as api:
        info = api.get("/v1/info").json()
    processes = info.get("processes")
    # Connections of front ends stay when a process with a device dies.
    if not processes or info.get("front_ends"):
        return
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            # Those that a process has received end with it.
            asks(stack.enter_context(Connection(server.address)))
        for each in processes:
            os.kill(each["pid"], signal.SIGKILL)
        until(lambda: is_served(server))


def test_two_thousand_slow_connections_leave_room_for_others(launched, until):
    """From one address; by the default limits, as far as this process may open sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("this system allows too few descriptors")
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
        # On a busy machine they need longer than a header may take.
        server = launched("--header-timeout-s", "100")
        for _ in range(2000):
            stack.enter_context(Connection(server.address)).send(b"GET /livez HT")
        with server.client() as api:
            assert_alive(api)
            # Front ends say at intervals how many they have.
            until(lambda: connections(api) == 2001)


@pytest.mark.parametrize("more", [(), ("--devices", "cpu,cpu")], ids=["one", "fleet"])
def test_exhausted_descriptors_are_said_and_survived(start_server, until, more):
    server = start_server(*more)
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(Connection(server.address))
        assert asks(inside) == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        waits = [stack.enter_context(Connection(server.address)) for _ in range(20)]
        until(lambda: "a connection could not be accepted" in server.log)
        assert asks(inside) == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
        assert [asks(connection) for connection in waits] == [200] * 20
    assert server.log.count("a connection could not be accepted") < 10
    assert "Traceback" not in server.log
