"""What becomes of a connection whose request is refused while its body is still coming."""

import asyncio
import contextlib
import functools

import pytest
from normserve.errors import OverloadedError
from normserve.http.transport import ConnectionTimeouts, DiscardLimits, body_discard

from tests.service.http.transport.drive import Driver

LENGTH = 3 * 2**20
HALF, SMALL = bytes(LENGTH // 2), bytes(100_000)
NEXT = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"


class Refusing:
    """Refuses every request by its header."""

    def __init__(self, status: int = 429, *, is_cut_off: bool = False) -> None:
        """Args: is_cut_off: each body was cut off before."""
        self.requests: list[str] = []
        self._status = status
        self._is_cut_off = is_cut_off

    async def serve(self, scope, send) -> None:
        self.requests.append(scope["path"])
        if self._is_cut_off:
            scope["state"]["reception"].abort(OverloadedError("others need its memory"))
        await send({"type": "http.response.start", "status": self._status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no", "more_body": False})


@contextlib.asynccontextmanager
async def connected(application=None, drains=None, patience=None):
    """A connection whose requests are refused."""
    loop, patience = asyncio.get_running_loop(), patience or ConnectionTimeouts(60, 60, 60)
    driver = Driver(loop, application or Refusing(), patience, drains or DiscardLimits(2 * LENGTH))
    try:
        yield driver
    finally:
        await driver.lose()


def on_a_loop(play):
    @functools.wraps(play)
    def test(*args, **kwargs) -> None:
        asyncio.run(play(*args, **kwargs))

    return test


@pytest.fixture
def hurried(monkeypatch):
    """What takes two seconds takes less."""
    monkeypatch.setattr(body_discard, "_SHORT_S", 0.05)


def post(*lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"POST /it HTTP/{version}", "Host: a", *lines, "", "")).encode()


SIZED = f"Content-Length: {LENGTH}"


async def receive(driver: Driver, data: bytes) -> bytes:
    """What is sent when bytes have arrived, and all has happened that can."""
    before = len(driver.wire.written)
    await driver.receive(data)
    await driver.settle()
    return bytes(driver.wire.written[before:])


async def end(driver: Driver) -> None:
    async with asyncio.timeout(10):
        while not driver.wire.is_closed:
            await asyncio.sleep(0.005)


@on_a_loop
async def test_large_body_is_refused_at_once_and_the_next_request_is_answered_after_it():
    async with connected() as driver:
        answer = await receive(driver, post(SIZED) + HALF)
        assert answer.endswith(b"\r\n\r\nno")
        assert b"connection" not in answer
        assert await receive(driver, HALF[1:]) == b""
        assert await receive(driver, b"." + NEXT) == answer
        assert driver.application.requests == ["/it", "/next"]


@on_a_loop
async def test_response_waits_for_a_small_body():
    async with connected() as driver:
        assert await receive(driver, post("Content-Length: 100000") + SMALL[1:]) == b""
        answer = await receive(driver, b".")
        assert answer.endswith(b"no")
        assert b"connection" not in answer
        assert await receive(driver, NEXT)


@on_a_loop
async def test_response_does_not_wait_for_a_small_body_for_long(hurried):
    async with connected() as driver:
        await receive(driver, post("Content-Length: 100000") + SMALL[1:])
        async with asyncio.timeout(10):
            while not driver.wire.written:
                await asyncio.sleep(0.005)
        assert await receive(driver, b"." + NEXT)


@on_a_loop
async def test_the_rest_of_a_body_that_was_cut_off_is_not_waited_for():
    async with connected(Refusing(is_cut_off=True)) as driver:
        assert await receive(driver, post("Content-Length: 100000") + SMALL[1:])
        assert await receive(driver, b"." + NEXT)


@on_a_loop
async def test_chunked_body_is_dropped_to_its_end():
    async with connected() as driver:
        piece = b"%x\r\n%b\r\n" % (len(HALF), HALF)
        assert await receive(driver, post("Transfer-Encoding: chunked") + piece)
        assert await receive(driver, piece) == b""
        assert await receive(driver, b"0\r\n\r\n" + NEXT)


@on_a_loop
async def test_malformed_rest_ends_the_connection_without_another_response():
    async with connected() as driver:
        await receive(driver, post("Transfer-Encoding: chunked") + b"5\r\nabcde\r\n")
        assert await receive(driver, b"no length\r\n") == b""
        assert driver.wire.is_closed
        assert driver.refusals == []


@pytest.mark.parametrize(("lines", "version"), [(("Connection: close",), "1.1"), ((), "1.0")])
@on_a_loop
async def test_last_request_of_a_connection_is_dropped_to_its_end(lines, version):
    async with connected() as driver:
        answer = await receive(driver, post(SIZED, *lines, version=version) + HALF)
        assert b"connection: close" in answer
        await receive(driver, HALF[1:])
        assert not driver.wire.is_closed
        await receive(driver, b".")
        assert driver.wire.is_closed


@on_a_loop
async def test_client_that_waits_for_leave_sends_no_body():
    async with connected() as driver:
        answer = await receive(driver, post(SIZED, "Expect: 100-continue"))
        assert b"connection: close" in answer
        assert b" 100 " not in answer
        assert driver.wire.is_closed


@on_a_loop
async def test_client_that_does_not_wait_for_leave_keeps_its_connection():
    async with connected() as driver:
        assert b"connection" not in await receive(driver, post(SIZED, "Expect: 100-continue") + HALF)
        assert await receive(driver, HALF + NEXT)


@on_a_loop
async def test_client_that_sends_no_more_is_let_go(hurried):
    async with connected() as driver:
        await receive(driver, post(SIZED) + HALF)
        await end(driver)


@on_a_loop
async def test_body_below_the_minimum_rate_is_not_waited_for(hurried):
    async with connected(patience=ConnectionTimeouts(60, 60, 60, min_bytes_per_s=2.0**20)) as driver:
        await receive(driver, post(SIZED))
        async with asyncio.timeout(10):
            while not driver.wire.is_closed:
                await receive(driver, b".")
                await asyncio.sleep(0.01)


@on_a_loop
async def test_body_that_takes_too_long_is_not_waited_for():
    async with connected(patience=ConnectionTimeouts(60, 60, 0.1)) as driver:
        await receive(driver, post(SIZED))
        async with asyncio.timeout(10):
            while not driver.wire.is_closed:
                await receive(driver, b"." * 1000)
                await asyncio.sleep(0.01)


@on_a_loop
async def test_chunked_body_is_dropped_up_to_the_limit():
    async with connected(drains=DiscardLimits(LENGTH)) as driver:
        piece = b"%x\r\n%b\r\n" % (len(HALF), HALF)
        await receive(driver, post("Transfer-Encoding: chunked") + piece)
        await receive(driver, piece)
        assert not driver.wire.is_closed
        # What came along with the header was not dropped, but received before.
        await receive(driver, piece)
        assert driver.wire.is_closed


@on_a_loop
async def test_body_that_announces_more_than_the_limit_has_little_time(hurried):
    async with connected(drains=DiscardLimits(LENGTH - 1)) as driver:
        assert b"connection: close" in await receive(driver, post(SIZED))
        async with asyncio.timeout(10):
            while not driver.wire.is_closed:
                await receive(driver, b"." * 1000)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("status", "places"), [(429, 8), (401, 2)])
@on_a_loop
async def test_few_connections_may_take_long(hurried, monkeypatch, status, places):
    """Fewer of strangers."""
    monkeypatch.setattr(body_discard, "_MAX_LONG_DRAINS", 8)
    drains = DiscardLimits(LENGTH)
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(connected(Refusing(status), drains)) for _ in range(places + 1)]
        answers = [await receive(driver, post(SIZED)) for driver in drivers]
        assert [b"connection: close" in answer for answer in answers] == [False] * places + [True]
        # A place is free again when the body is complete, and when its client has gone.
        assert await receive(drivers[0], HALF + HALF) == b""
        await receive(drivers[0], post(SIZED))
        await drivers[1].lose()
        late = await stack.enter_async_context(connected(Refusing(status), drains))
        assert b"connection" not in await receive(late, post(SIZED))


@on_a_loop
async def test_connection_is_idle_after_the_body():
    """It is not waited for a header as after the first byte of one."""
    async with connected(patience=ConnectionTimeouts(0.05, 60, 60)) as driver:
        await receive(driver, post(SIZED))
        await receive(driver, HALF + HALF)
        await asyncio.sleep(0.2)
        assert not driver.wire.is_closed
        assert await receive(driver, NEXT)


@on_a_loop
async def test_body_is_dropped_while_the_server_ends(hurried):
    async with connected() as driver:
        await receive(driver, post(SIZED) + HALF)
        driver.protocol.shutdown()
        await receive(driver, HALF[1:])
        assert not driver.wire.is_closed
        await receive(driver, b".")
        assert driver.wire.is_closed


@on_a_loop
async def test_connection_is_not_idle_if_the_next_request_has_come_with_the_end_of_the_body(monkeypatch):
    monkeypatch.setattr("normserve.http.transport.idle_connections._LEAST_IDLE_S", 0.0)
    for request in (post("Content-Length: 5"), b"GET /"):
        async with connected() as driver:
            # Only with chunks does one read cross the end of a body.
            await receive(driver, post("Transfer-Encoding: chunked") + b"1\r\n.\r\n")
            await receive(driver, b"0\r\n\r\n" + request)
            assert driver.protocol.timeout_keep_alive_task is None
            assert not driver.idle.try_close_oldest(None)
