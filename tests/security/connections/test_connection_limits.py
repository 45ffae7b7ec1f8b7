"""More connections than may be open: the others are told so, and who is inside is served."""

import contextlib
import os
import re
import resource
import signal
import socket

import pytest

from tests.integration.harness.raw import Connection, exchange
from tests.integration.harness.wire import assert_alive, assert_problem

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def asks(connection: socket.socket) -> int:
    """The status of one request on it."""
    connection.sendall(LIVEZ)
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


@pytest.fixture(scope="module", params=["one", "fleet"])
def limited(request, launched, tmp_path_factory):
    """A server with few connections, at a port and at a Unix socket, and the path of that."""
    path = tmp_path_factory.mktemp("uds") / "socket"
    more = ("--devices", "cpu,cpu") if request.param == "fleet" else ()
    return launched(*OPTIONS, "--uds", str(path), *more), path


def unix(path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(path))
    return connection


def is_served(server) -> bool:
    """Whether a new connection is."""
    with contextlib.suppress(OSError, IndexError), Connection(server.address) as connection:
        return asks(connection) == 200
    return False


def test_limits_of_connections(limited, until):
    server, path = limited
    with contextlib.ExitStack() as stack:
        inside = [stack.enter_context(Connection(server.address)) for _ in range(4)]
        # From one address no more.
        for _ in range(20):
            answer = exchange(server.address, LIVEZ)
            assert_problem(answer, 503, "too_many_connections")
            assert answer.headers["retry-after"] == "1"
        inside += [stack.enter_context(unix(path)) for _ in range(2)]
        # From all of them no more.
        late = stack.enter_context(unix(path))
        assert late.recv(65536).startswith(b"HTTP/1.1 503")
        assert late.recv(65536) == b""
        assert [asks(connection) for connection in inside] == [200] * 6
    until(lambda: is_served(server))
    with server.client() as api:
        assert refused(api, "max_connections_per_address") >= 20
        assert refused(api, "max_connections") >= 1
        # A process that is asked for its metrics by another is a client of that one, too.
        until(lambda: 1 <= connections(api) <= 2)
    lines = [line for line in server.log.splitlines() if "a connection was refused" in line]
    assert 1 <= len(lines) < 15


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
    """From one address; by the defaults, as far as this process may open sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("this system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    server = launched()
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(Connection(server.address)).send(b"GET /livez HT")
        with server.client() as api:
            assert_alive(api)
            assert connections(api) == 2001


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
