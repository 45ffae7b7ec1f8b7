"""Who may connect, how many, and what the others are told."""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import socket

import pytest
from normserve.process import connection_limits
from normserve.process.connection_limits import (
    ConnectionLimits,
    identify_client,
    raise_descriptor_limit_for_connections,
)

from tests.integration.harness.raw import Answer
from tests.integration.harness.wire import assert_problem


def on_a_loop(play):
    @functools.wraps(play)
    def test(*args, **kwargs) -> None:
        asyncio.run(play(*args, **kwargs))

    return test


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def limits(refused):
    return ConnectionLimits(max_all=3, max_per_address=2, reserve=0, on_refused=refused.append)


class Somewhere(socket.socket):
    """One end of a connection that seems to come from an address."""

    def __init__(self, address: str) -> None:
        ours, self.client = socket.socketpair()
        super().__init__(socket.AF_INET6 if ":" in address else socket.AF_INET, fileno=ours.detach())
        self._address = address

    def getpeername(self):
        return (self._address, 1)


@pytest.fixture
def comes_from(monkeypatch):
    monkeypatch.setattr(connection_limits, "_LINGER_S", 0.0)
    with contextlib.ExitStack() as stack:

        def connect(address: str) -> Somewhere:
            made = Somewhere(address)
            stack.enter_context(made.client)
            stack.enter_context(made)
            made.setblocking(False)
            return made

        yield connect


@on_a_loop
async def test_one_address_has_its_share(limits, refused, comes_from):
    assert limits.try_admit_connection(comes_from("1.1.1.1")) == ("1.1.1.1", None)
    assert limits.try_admit_connection(comes_from("1.1.1.1")) == ("1.1.1.1", None)
    assert limits.try_admit_connection(comes_from("1.1.1.1")) is None
    assert limits.try_admit_connection(comes_from("2.2.2.2")) == ("2.2.2.2", None)
    assert limits.try_admit_connection(comes_from("3.3.3.3")) is None
    assert refused == ["max_connections_per_address", "max_connections"]
    assert limits.open_count == 3


@on_a_loop
async def test_a_few_more_are_accepted_and_marked(refused, comes_from):
    limits = ConnectionLimits(max_all=4, max_per_address=2, reserve=2, on_refused=refused.append)
    addresses = ["1.1.1.1"] * 5 + ["2.2.2.2"] * 4 + ["3.3.3.3"]
    admitted = [limits.try_admit_connection(comes_from(address)) for address in addresses]
    address, all_of_them = "max_connections_per_address", "max_connections"
    beyond = [None if admission is None else admission.exceeded_limit or "within" for admission in admitted]
    assert beyond == ["within", "within", address, address, None, all_of_them, all_of_them, None, None, None]
    assert refused == [address, all_of_them, all_of_them, all_of_them]
    for _ in range(2):
        limits.release_connection("1.1.1.1")
        limits.release_connection("2.2.2.2")
    assert limits.try_admit_connection(comes_from("3.3.3.3")) == ("3.3.3.3", None)


@on_a_loop
async def test_what_has_ended_makes_room(limits, refused, comes_from):
    for _ in range(3):
        for _ in range(2):
            limits.try_admit_connection(comes_from("1.1.1.1"))
        for _ in range(2):
            limits.release_connection("1.1.1.1")
    assert (limits.open_count, refused) == (0, [])


@on_a_loop
async def test_refusal_is_an_answer(limits, comes_from):
    for _ in range(2):
        limits.try_admit_connection(comes_from("1.1.1.1"))
    late = comes_from("1.1.1.1")
    late.client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert limits.try_admit_connection(late) is None
    answer = Answer(late.client.recv(65536))
    assert_problem(answer, 503, "too_many_connections")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-content-type-options"] == "nosniff"
    while late.fileno() >= 0:
        await asyncio.sleep(0)
    assert late.client.recv(1) == b""


@on_a_loop
async def test_of_many_that_are_refused_few_linger(limits, comes_from, monkeypatch):
    monkeypatch.setattr(connection_limits, "_LINGER_S", 0.05)
    for _ in range(2):
        limits.try_admit_connection(comes_from("1.1.1.1"))
    for _ in range(2):
        late = [comes_from("1.1.1.1") for _ in range(100)]
        for each in late:
            assert limits.try_admit_connection(each) is None
        lingering = [each for each in late if each.fileno() >= 0]
        assert 0 < len(lingering) <= 64
        while any(each.fileno() >= 0 for each in late):
            await asyncio.sleep(0.001)
        for each in late:
            assert Answer(each.client.recv(65536)).status_code == 503


@on_a_loop
async def test_log_has_one_line_a_second(limits, comes_from, caplog):
    for _ in range(50):
        limits.try_admit_connection(comes_from("1.1.1.1"))
    assert [record.getMessage() for record in caplog.records] == [
        "a connection was refused: max_connections_per_address is 2"
    ]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
    ],
)
def test_address(comes_from, peer, address):
    assert identify_client(comes_from(peer)) == address


def test_address_at_a_unix_socket(comes_from):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert identify_client(ours) == f"uid {os.getuid()}"


@on_a_loop
async def test_accepting_goes_on_when_descriptors_are_there_again(limits, caplog, monkeypatch):
    monkeypatch.setattr(connection_limits, "_PAUSE_S", 0.0)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 20
    accepted = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def sock_accept(listener):
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", sock_accept, raising=False)

    async def take(connection, admission):
        accepted.set_result((connection, admission.address))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        task = asyncio.create_task(limits.accept_connections(listener, take))
        with socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(10):
                connection, address = await accepted
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert address == "127.0.0.1"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "a connection could not be accepted: [Errno 24] Too many open files"
    ]


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised", "possible"),
    [
        (1024, 20000, 4096, 4416, 4096),
        (20000, 20000, 4096, None, 4096),
        (1024, 2000, 4096, 2000, 1680),
        (1024, 1024, 4096, None, 704),
        (64, 64, 4096, None, 32),
        (1024, resource.RLIM_INFINITY, 4096, 4416, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, None, 4096),
        (1024, 20000, 100, None, 100),
    ],
)
def test_connections_fit_into_the_descriptors(monkeypatch, soft, hard, wanted, raised, possible):
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: now.append(limit))
    assert raise_descriptor_limit_for_connections(wanted) == possible
    assert now[1:] == ([] if raised is None else [(raised, hard)])


def test_connections_that_the_process_opens_have_descriptors_too(monkeypatch):
    now = [(1024, 20000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: now.append(limit))
    assert raise_descriptor_limit_for_connections(4096, outgoing=1024) == 4096
    assert now[1:] == [(4096 + 1024 + 320, 20000)]
