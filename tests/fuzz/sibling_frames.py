"""What processes of a fleet say to one another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from normserve.peers.sibling_processes import FrameStream, SiblingConnection, SiblingResponseError

from tests.fuzz.streams import cut, run

# Small, so that inputs of a few bytes meet every limit.
_FRAME_BYTES = 40


_READER_BYTES = 64


_READ_BYTES = 128

# What the reader has, and what was read from it at once before, with a frame that is not complete.
_MOST_UNREAD = 8 + _FRAME_BYTES + 2 * (2 * _READER_BYTES + _READ_BYTES)


def sibling_frames(data: bytes) -> None:
    """What a process of the fleet says is frames or ends the connection, and so is what it answers."""
    pieces, stream, _ = cut(data)
    expected, ends_whole = _frames_of(stream, _FRAME_BYTES)
    heard: list[bytes] = []
    assert run(_frames_end_whole(pieces, heard)) == ends_whole
    # What was whole before a frame that is too long, in the same piece, goes with the connection.
    assert heard == (expected if ends_whole else expected[: len(heard)])
    answers, are_whole = _frames_of(stream, len(stream))
    try:
        assert [b"+" + run(_answer_in(pieces))] == answers[:1]
    except SiblingResponseError:
        assert not answers[0].startswith(b"+")
    except ConnectionError:
        assert not (answers and are_whole)


def _frames_of(stream: bytes, at_most: int) -> tuple[list[bytes], bool]:
    """The frames up to one that is too long or cut off, and whether there is none of those."""
    frames: list[bytes] = []
    while len(stream) >= 8:
        end = 8 + int.from_bytes(stream[:4], "little")
        if end - 8 > at_most or end > len(stream):
            return frames, False
        frames.append(stream[8:end])
        stream = stream[end:]
    return frames, not stream


class _Arriving:
    """A connection on which bytes come in pieces, and what is said is heard by nobody."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._is_paused = False
        self.unread = 0
        self.reader = asyncio.StreamReader(limit=_READER_BYTES)
        self.reader.set_transport(self)  # type: ignore[arg-type]

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def arrive(self) -> None:
        for piece in self._pieces:
            for start in range(0, len(piece), _READ_BYTES):
                while self._is_paused:
                    await asyncio.sleep(0)
                read = piece[start : start + _READ_BYTES]
                self.unread += len(read)
                self.reader.feed_data(read)
                # Whoever reads has its turn, and if it needs more the next piece comes.
                await asyncio.sleep(0)
        self.reader.feed_eof()


@contextlib.asynccontextmanager
async def _arriving(pieces: list[bytes]) -> AsyncIterator[_Arriving]:
    connection = _Arriving(pieces)
    arrival = asyncio.create_task(connection.arrive())
    try:
        yield connection
    finally:
        arrival.cancel()


async def _frames_end_whole(pieces: list[bytes], heard: list[bytes]) -> bool:
    """Gather the frames; whether the connection ended between two."""
    async with _arriving(pieces) as connection:
        with contextlib.suppress(ConnectionError):
            stream = FrameStream(connection.reader, connection, _FRAME_BYTES)  # type: ignore[arg-type]
            while (frame := await stream.receive_frame()) is not None:
                heard.append(frame)
                connection.unread -= 8 + len(frame)
                assert connection.unread <= _MOST_UNREAD
            return True
        assert connection.unread <= _MOST_UNREAD
        return False


async def _answer_in(pieces: list[bytes]) -> bytes:
    async with _arriving(pieces) as connection:
        link = SiblingConnection(0, connection.reader, connection)  # type: ignore[arg-type]
        return await link.send_request({"do": "metrics"}, timeout_s=60)
