"""How long a process waits for the others of its fleet."""

import asyncio
import contextlib

import pytest
from normserve import siblings
from normserve.siblings import Place, Siblings


@contextlib.asynccontextmanager
async def slow_sibling(place: Place, done: list[str]):
    """The other process, which takes a tenth of a second for everything."""

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.1)
            done.append(head.decode().partition(" HTTP")[0])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, place.socket_of(1)):
        yield


@pytest.fixture
def place(tmp_path):
    return Place(index=0, count=2, device="cpu", restarts=0, folder=tmp_path)


def test_a_layer_is_registered_once_all_have_it_however_long_that_takes(place, monkeypatch):
    monkeypatch.setattr(siblings, "_ANSWER_S", 0.01)
    done = []

    async def play() -> None:
        async with slow_sibling(place, done):
            assert await Siblings(place).ask("/metrics") == {}
            await Siblings(place).tell("PUT", "/v1/layers/a?op=rms_norm", {}, b"")
            assert done[-1] == "PUT /v1/layers/a?op=rms_norm"

    asyncio.run(play())


def test_one_that_is_not_there_holds_nothing_up(place):
    asyncio.run(Siblings(place).tell("DELETE", "/v1/layers/a", {}, b""))
    assert asyncio.run(Siblings(place).ask("/metrics")) == {}
