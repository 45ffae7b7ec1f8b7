"""Which connections give way to new ones, and what those beyond the limits are for."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from normserve.http.transport import ConnectionTimeouts, idle_connections
from normserve.http.transport.http_parser_protocol import PROBES
from normserve.http.transport.idle_connections import IdleConnectionQueue

from tests.service.http.transport.drive import Driver, view

HEADS = "Host: a\r\n\r\n"
POST = f"POST /it HTTP/1.1\r\nContent-Length: 4\r\n{HEADS}"


@pytest.fixture
def clock(monkeypatch):
    """The time that it is."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(idle_connections, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Idle:
    """A connection without a request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    def shutdown(self) -> None:
        self.is_closed = True


def test_the_oldest_one_is_closed_first(clock):
    connections, waiting = IdleConnectionQueue(), [Idle(address) for address in "aabba"]
    for connection in waiting:
        connections.add_connection(connection)
        clock.now += 1
    connections.discard_connection(waiting[0])
    assert connections.try_close_oldest("b")
    assert connections.try_close_oldest(None)
    assert [each.is_closed for each in waiting] == [False, True, True, False, False]
    assert connections.try_close_oldest("a")
    assert not connections.try_close_oldest("a")
    assert [each.is_closed for each in waiting] == [False, True, True, False, True]


def test_one_that_was_used_again_is_the_youngest(clock):
    connections, waiting = IdleConnectionQueue(), [Idle("a"), Idle("a")]
    for connection in (*waiting, waiting[0]):
        connections.discard_connection(connection)
        connections.add_connection(connection)
        clock.now += 2
    assert connections.try_close_oldest(None)
    assert [each.is_closed for each in waiting] == [False, True]


def test_one_between_two_requests_is_not_idle(clock):
    connections = IdleConnectionQueue()
    connections.add_connection(Idle("a"))
    clock.now += 0.9
    assert not connections.try_close_oldest(None)
    clock.now += 0.2
    assert connections.try_close_oldest(None)


def on_a_loop(play):
    @functools.wraps(play)
    def test(*args, **kwargs) -> None:
        asyncio.run(play(*args, **kwargs))

    return test


class Host:
    """Connections of one process."""

    def __init__(self) -> None:
        self.idle = IdleConnectionQueue()
        self.drivers: list[Driver] = []

    def connect(self, beyond: str | None = None, address: str = "a", patience=None) -> Driver:
        driver = Driver(
            asyncio.get_running_loop(),
            patience=patience or ConnectionTimeouts(60, 60, 60),
            idle=self.idle,
            admission=(address, beyond),
        )
        self.drivers.append(driver)
        return driver

    async def __aenter__(self):
        return self

    async def __aexit__(self, *failure):
        for driver in self.drivers:
            await driver.lose()


async def send(driver: Driver, text: str):
    await driver.receive(text.encode())
    await driver.settle()
    return view(driver.events())


@on_a_loop
async def test_connection_is_idle_without_a_request(clock):
    async with Host() as host:
        fresh, used, begun, receiving = (host.connect() for _ in range(4))
        assert (await send(used, POST + "body")).statuses == [200]
        await send(begun, "GET /")
        await send(receiving, POST + "bo")
        clock.now += 10
        assert host.idle.try_close_oldest(None)
        assert fresh.wire.is_closed
        assert host.idle.try_close_oldest(None)
        assert used.wire.is_closed
        assert not host.idle.try_close_oldest(None)
        assert (await send(receiving, "dy")).statuses == [200]
        clock.now += 10
        await receiving.lose()
        assert not host.idle.try_close_oldest(None)


@pytest.mark.parametrize(
    ("beyond", "address", "closed"),
    [("max_connections", "b", "a"), ("max_connections_per_address", "b", "b"), (None, "b", "")],
)
@on_a_loop
async def test_connection_beyond_a_limit_takes_the_place_of_an_idle_one(clock, beyond, address, closed):
    async with Host() as host:
        idle_ones = {each: host.connect(address=each) for each in "ab"}
        clock.now += 10
        newcomer = host.connect(beyond, address)
        assert "".join(each for each, driver in idle_ones.items() if driver.wire.is_closed) == closed
        seen = await send(newcomer, POST + "body")
        assert (seen.statuses, seen.closed) == ([200], False)


@pytest.mark.parametrize("path", sorted(path.decode() for path in PROBES))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@on_a_loop
async def test_without_an_idle_one_it_is_for_one_probe(path, method):
    async with Host() as host:
        seen = await send(host.connect("max_connections"), f"{method} {path}?a=b HTTP/1.1\r\n{HEADS}" * 2)
        assert (seen.statuses, seen.closed) == ([200], True)


@pytest.mark.parametrize(
    "request_text",
    [
        POST + "body",
        POST,
        f"GET / HTTP/1.1\r\n{HEADS}",
        f"POST /metrics HTTP/1.1\r\n{HEADS}",
        f"GET /metrics HTTP/1.1\r\nContent-Length: 1\r\n{HEADS}",
        f"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n{HEADS}",
        f"GET /livez/ HTTP/1.1\r\n{HEADS}",
    ],
)
@on_a_loop
async def test_without_an_idle_one_all_else_is_refused(request_text):
    async with Host() as host:
        seen = await send(host.connect("max_connections_per_address"), request_text)
        assert (seen.statuses, seen.codes, seen.closed) == ([503], ["too_many_connections"], True)
        assert seen.requests == []
        (refusal,) = host.drivers[0].refusals
        assert refusal.limit == "max_connections_per_address"


@on_a_loop
async def test_connection_for_a_probe_must_not_hesitate():
    async with Host() as host:
        hesitant = host.connect("max_connections", patience=ConnectionTimeouts(0.02, 60, 60))
        async with asyncio.timeout(10):
            while not hesitant.wire.is_closed:
                await asyncio.sleep(0.01)
        assert host.connect("max_connections").header_s == 1.0
        assert host.connect().header_s == 60.0
