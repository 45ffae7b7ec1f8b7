"""What the processes of a fleet say to one another, and who may not."""

import asyncio
import contextlib

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec.framing import PREFIX
from normserve.errors import NormserveError
from normserve.peers import sibling_processes
from normserve.peers.sibling_processes import FleetPosition, FrameStream, SiblingProcesses, SiblingResponseError


@pytest.fixture
def place(tmp_path):
    return FleetPosition(index=0, count=2, device="cpu", restarts=0, folder=tmp_path)


def other(place: FleetPosition) -> SiblingProcesses:
    return SiblingProcesses(FleetPosition(1, place.count, "cpu", 0, place.folder))


@contextlib.asynccontextmanager
async def listening(sibling: SiblingProcesses, **handlers):
    sibling.handlers |= handlers
    server = await sibling.start_listening()
    try:
        yield
    finally:
        server.close()


def saying(text: bytes, after_s: float = 0.0):
    async def answer(question, at_end):
        await asyncio.sleep(after_s)
        return text

    return answer


def test_those_that_answer_are_heard(place):
    async def play() -> None:
        async with listening(other(place), metrics=saying(b"text")):
            assert await SiblingProcesses(place).request_all("metrics") == {1: b"text"}

    asyncio.run(play())


def test_one_that_takes_long_holds_nothing_up(place, monkeypatch):
    monkeypatch.setattr(sibling_processes, "_ANSWER_S", 0.01)

    async def play() -> None:
        async with listening(other(place), metrics=saying(b"text", after_s=0.2)):
            assert await SiblingProcesses(place).request_all("metrics") == {}

    asyncio.run(play())


def test_one_that_is_not_there_holds_nothing_up(place):
    async def play() -> None:
        assert await SiblingProcesses(place).request_all("metrics") == {}
        async with SiblingProcesses(place).connect_all_listening() as links:
            assert links == []

    asyncio.run(play())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_one_that_ends_after_it_was_connected_is_gone_each_time_it_is_asked(place, run):
    async def play():
        connected = []
        server = await asyncio.start_unix_server(lambda *ends: connected.append(ends), place.get_socket_path(1))
        async with SiblingProcesses(place).connect_all_listening() as links, server:
            (link,) = links
            while not connected:
                await asyncio.sleep(0.001)
            connected[0][1].transport.abort()
            for _ in range(3):
                with pytest.raises(ConnectionError):
                    await link.send_request({"do": "greet"}, 20)

    run(play())


def test_no_fleet_no_siblings():
    async def play() -> None:
        assert await SiblingProcesses(None).start_listening() is None
        assert await SiblingProcesses(None).request_all("metrics") == {}
        assert await SiblingProcesses(None).render_metrics(b"own") == b"own"

    asyncio.run(play())


def test_a_sibling_says_why_it_cannot(place):
    async def refuse(question, at_end):
        raise NormserveError(f"not {question['what']}")

    async def break_down(question, at_end):
        raise RuntimeError("secret")

    async def play() -> None:
        there = listening(other(place), refuse=refuse, break_down=break_down)
        async with there, SiblingProcesses(place).connect_all_listening() as links:
            for question in ({"do": "break_down"}, {"do": "unheard of"}):
                with pytest.raises(SiblingResponseError, match="an error of its own"):
                    await links[0].send_request(question, 1)
            with pytest.raises(SiblingResponseError, match="not this"):
                await links[0].send_request({"do": "refuse", "what": "this"}, 1)

    asyncio.run(play())


def test_what_is_to_be_done_at_the_end_is_done_however_it_comes(place):
    ended = []

    async def begin(question, at_end):
        at_end.callback(ended.append, question["name"])
        return b""

    async def play() -> None:
        async with listening(other(place), begin=begin):
            async with SiblingProcesses(place).connect_all_listening() as links:
                await links[0].send_request({"do": "begin", "name": "closed"}, 1)
                assert ended == []
            async with SiblingProcesses(place).connect_all_listening() as links:
                await links[0].send_request({"do": "begin", "name": "aborted"}, 1)
                links[0]._stream._writer.transport.abort()
            while len(ended) < 2:
                await asyncio.sleep(0.001)

    asyncio.run(play())
    assert ended == ["closed", "aborted"]


def frame(content: bytes) -> bytes:
    return PREFIX.pack(len(content), 0) + content


@given(st.data())
def test_frames_survive_every_cut(data):
    questions = data.draw(st.lists(st.binary(max_size=40), max_size=6))
    stream = b"".join(map(frame, questions))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))

    async def play() -> list[bytes]:
        reader = asyncio.StreamReader()
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            reader.feed_data(stream[start:stop])
        reader.feed_eof()
        heard = []
        there = FrameStream(reader, None, 40)
        while (content := await there.receive_frame()) is not None:
            heard.append(content)
        return heard

    assert asyncio.run(play()) == questions


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 11])
def test_a_frame_that_is_cut_off_is_not_the_end(length):
    async def play() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(b"") + frame(b"text")[:length])
        reader.feed_eof()
        stream = FrameStream(reader, None, 40)
        assert await stream.receive_frame() == b""
        with pytest.raises(ConnectionResetError, match="within a frame"):
            await stream.receive_frame()

    asyncio.run(play())


async def said_to(place: FleetPosition, raw: bytes) -> bytes:
    """All that comes back for these bytes."""
    reader, writer = await asyncio.open_unix_connection(place.get_socket_path(1))
    writer.write(raw)
    writer.write_eof()
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /metrics HTTP/1.1\r\nHost: sibling\r\n\r\n",
        b"\xff\xff\xff\xff\0\0\0\0",
        PREFIX.pack(64 * 1024 + 1, 0) + b"x" * 70_000,
        frame(b'{"do": "metrics"}')[:-1],
        b"\0\0",
    ],
)
def test_what_is_no_question_ends_the_connection(place, raw):
    async def play() -> None:
        async with listening(other(place), metrics=saying(b"text")):
            assert await said_to(place, raw) == b""
            assert await SiblingProcesses(place).request_all("metrics") == {1: b"text"}

    asyncio.run(play())


@pytest.mark.parametrize(
    "question", [b"no json", b"\xff", b"[" * 50_000, b"[]", b"1", b'"do"', b"{}", b'{"do": []}', b'{"do": null}']
)
def test_a_question_that_means_nothing_is_refused(place, question):
    async def play() -> None:
        async with listening(other(place), metrics=saying(b"text")):
            assert await said_to(place, frame(question)) == frame(b"-an error of its own")

    asyncio.run(play())


@pytest.mark.parametrize(
    ("said", "reason"),
    [(b"", "its answer is malformed"), (b"text", "its answer is malformed"), (b"-\xffno", "\ufffdno")],
    ids=["nothing", "no-sign", "no-text"],
)
def test_what_is_no_answer_is_no_success(place, said, reason):
    async def say(reader, writer):
        stream = FrameStream(reader, writer, 40)
        await stream.receive_frame()
        await stream.send_frame(said)
        writer.close()

    async def play() -> None:
        there = await asyncio.start_unix_server(say, place.get_socket_path(1))
        async with there, SiblingProcesses(place).connect_all_listening() as links:
            with pytest.raises(SiblingResponseError, match=reason):
                await links[0].send_request({"do": "metrics"}, 1)
            assert await SiblingProcesses(place).request_all("metrics") == {}

    asyncio.run(play())


def test_another_users_process_is_not_listened_to(place, monkeypatch):
    async def play() -> None:
        async with listening(other(place), metrics=saying(b"text")):
            assert await said_to(place, frame(b'{"do": "metrics"}')) == frame(b"+text")
            monkeypatch.setattr("os.getuid", lambda: 12345)
            assert await said_to(place, frame(b'{"do": "metrics"}')) == b""

    asyncio.run(play())
