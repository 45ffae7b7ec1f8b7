"""The processes of one server, and the connections between them.

Every process owns a device and its own copy of the registered layers.  They communicate over Unix domain sockets
in a folder that only the server's user may enter, with frames that no HTTP server accepts, so that a client's
request cannot be mistaken for a message of another process.

The content of a frame (`codec.framing`; its tag means nothing) is a request, a JSON object of strings with the name
of the request under "do", or a response, one byte, `+` or `-`, and its content.  A connection may carry several,
one after another.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normserve.codec.framing import PREFIX, FrameReader
from normserve.errors import NormserveError, TooLargeError
from normserve.metrics.exposition import merge_expositions

log = logging.getLogger(__name__)

Question = Mapping[str, str]

#: Answers a request; the callbacks that it pushes are called when the connection ends for any reason.
Handler = Callable[[Question, contextlib.AsyncExitStack], Awaitable[bytes]]

# A process that starts or hangs must not delay a scrape for longer than Prometheus waits.
_ANSWER_S = 2.0
_PEER = struct.Struct("3i")
_READ_BYTES = 64 * 1024
_QUESTION_BYTES = 64 * 1024
_ANSWER_BYTES = 64 * 2**20
_GOOD, _BAD = b"+", b"-"


@dataclass(frozen=True, slots=True)
class FleetPosition:
    """The index, device and shared folder of one process among the server's several processes (the fleet).

    Attributes:
        index, count: this process's index, and the number of processes.
        device: the device that it owns, as `--devices` names it.
        restarts: how often the process with this index has ended unexpectedly.
        folder: the folder of the fleet's sockets and registered layers.
        is_visible_to_clients: whether clients see which process is which.
        children: the names of the supervisor's children without a device, whose restarts this process counts.
    """

    index: int
    count: int
    device: str
    restarts: int
    folder: Path
    is_visible_to_clients: bool = True
    children: Sequence[str] = ()

    def get_socket_path(self, index: int) -> Path:
        """Return the path of the socket on which the process with this index listens."""
        return self.folder / f"{index}.sock"


class SiblingResponseError(Exception):
    """An error raised when another process of the server refuses a request or sends a malformed response."""


class FrameStream:
    """A connection between two processes of the server that carries length-prefixed frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int) -> None:
        """Args: max_bytes: limit of the content of a received frame."""
        self._reader, self._writer = reader, writer
        self._frame_reader = FrameReader(max_bytes)
        self._received_frames: deque[bytes] = deque()

    async def send_frame(self, content: bytes) -> None:
        """Send a frame with this content, and wait while the connection's buffer is full.

        Raises:
            ConnectionError: the other process has ended.
        """
        try:
            self._writer.write(PREFIX.pack(len(content), 0) + content)
        except RuntimeError as error:
            # uvloop raises this if the connection has ended meanwhile.
            raise ConnectionResetError("the other process has ended") from error
        await self._writer.drain()

    async def receive_frame(self) -> bytes | None:
        """Return the content of the next frame; None once the other process has ended the connection.

        Raises:
            ConnectionError: the connection broke within a frame, or one is longer than permitted.
        """
        while not self._received_frames:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                if self._frame_reader.has_partial_frame:
                    raise ConnectionResetError("the connection broke within a frame")
                return None
            try:
                self._received_frames += [content for _, content in self._frame_reader.feed(data)]
            except TooLargeError as error:
                raise ConnectionAbortedError(error.detail) from None
        return self._received_frames.popleft()

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class SiblingConnection:
    """A connection over which this process sends requests to one other process of the server.

    Attributes:
        index: the sibling's.
    """

    def __init__(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.index = index
        self._stream = FrameStream(reader, writer, _ANSWER_BYTES)

    async def send_request(self, question: Question, timeout_s: float) -> bytes:
        """Send a request to the other process; wait for its response and return the response's content.

        Raises:
            SiblingRefusedError: the sibling refused the request, or its response is malformed.
            ConnectionError: the sibling has ended.
            TimeoutError: the sibling did not answer in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._stream.send_frame(json.dumps(question).encode())
            answer = await self._stream.receive_frame()
        if answer is None:
            raise ConnectionResetError("the other process has ended")
        if answer[:1] == _GOOD:
            return answer[1:]
        if answer[:1] == _BAD:
            raise SiblingResponseError(answer[1:].decode(errors="replace"))
        # The sibling runs, and must not count as ended.
        raise SiblingResponseError("its answer is malformed")

    def close(self) -> None:
        """End the connection."""
        self._stream.close()


class SiblingProcesses:
    """The other processes of this server, with which metrics and changes of layers are exchanged.  Empty for
    a server of one process.

    Attributes:
        process_label: the label of this process's metrics.
        handlers: the handlers of the siblings' requests, by request name.
    """

    def __init__(self, place: FleetPosition | None) -> None:
        self.position = place
        self.process_label: str | None = (
            str(place.index) if place is not None and place.is_visible_to_clients else None
        )
        self.handlers: dict[str, Handler] = {}
        self._serve_tasks: set[asyncio.Task[None]] = set()

    async def start_listening(self) -> asyncio.Server | None:
        """Listen on this process's Unix socket and answer the siblings' requests; return None without a fleet.
        A socket that an earlier process left is replaced.
        """
        if self.position is None:
            return None

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A task that the stream created would report its cancellation at the loop's end as an error.
            task = asyncio.get_running_loop().create_task(self._serve_connection(reader, writer))
            self._serve_tasks.add(task)
            task.add_done_callback(self._serve_tasks.discard)

        return await asyncio.start_unix_server(serve, self.position.get_socket_path(self.position.index))

    def require_changeable_layers(self) -> None:
        """Raise an error if registered layers cannot be changed while the server runs.  This class allows changes;
        a subclass may raise the error.

        Raises:
            NormserveError: layers cannot be registered or removed here.
        """

    async def request_all(self, request_name: str) -> dict[int, bytes]:
        """Send a request without arguments to all siblings at once; return their responses by process index.

        Siblings that refuse, or do not answer in two seconds, are left out.

        Args:
            request_name: the name of the request, a key of the siblings' `handlers`.
        """

        async def answer(index: int) -> bytes | None:
            try:
                async with asyncio.timeout(_ANSWER_S), self._connect(index) as link:
                    return await link.send_request({"do": request_name}, _ANSWER_S)
            except (OSError, TimeoutError, SiblingResponseError):
                return None

        others = self._list_siblings()
        answers = await asyncio.gather(*(answer(index) for index in others))
        return {index: content for index, content in zip(others, answers, strict=True) if content is not None}

    async def render_metrics(self, own: bytes) -> bytes:
        """Fetch the siblings' metrics, and return those of all processes as one Prometheus text.

        Args: own: the metrics text of this process.
        """
        if self.position is None or not self.position.is_visible_to_clients:
            return own
        texts = {str(index): text for index, text in (await self.request_all("metrics")).items()}
        return merge_expositions(
            {str(self.position.index): own} | texts, [str(index) for index in range(self.position.count)]
        )

    @contextlib.asynccontextmanager
    async def connect_all_listening(self) -> AsyncIterator[list[SiblingConnection]]:
        """Open a connection to each sibling that listens, and close them when the context ends.  Siblings that
        do not listen are left out.

        Raises:
            OSError: this process cannot open connections: descriptors may be exhausted.
        """
        async with contextlib.AsyncExitStack() as stack:
            links = []
            for index in self._list_siblings():
                # No process listens there: not yet, or no longer.
                with contextlib.suppress(FileNotFoundError, ConnectionError):
                    links.append(await stack.enter_async_context(self._connect(index)))
            yield links

    @contextlib.asynccontextmanager
    async def _connect(self, index: int) -> AsyncIterator[SiblingConnection]:
        """Open a connection to the sibling with this index, and close it when the context ends."""
        assert self.position is not None
        link = SiblingConnection(index, *await asyncio.open_unix_connection(self.position.get_socket_path(index)))
        try:
            yield link
        finally:
            link.close()

    def _list_siblings(self) -> list[int]:
        """List the indices of all other processes; empty without a fleet."""
        place = self.position
        return [] if place is None else [index for index in range(place.count) if index != place.index]

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a sibling's requests, one after another, until the connection ends.  Connections of other users
        are refused.
        """
        try:
            if not _is_same_user(writer):
                log.warning("a process of another user tried to connect as one of the fleet")
                return
            stream = FrameStream(reader, writer, _QUESTION_BYTES)
            async with contextlib.AsyncExitStack() as at_end:
                with contextlib.suppress(ConnectionError):
                    while (question := await stream.receive_frame()) is not None:
                        await stream.send_frame(await self._handle_request(question, at_end))
        finally:
            writer.close()

    async def _handle_request(self, frame: bytes, at_end: contextlib.AsyncExitStack) -> bytes:
        """Call the handler of a request and return the content of the response frame; errors become refusals.

        Args:
            at_end: the callbacks to call when the connection ends; the handler may add some.
        """
        try:
            question = json.loads(frame)
            return _GOOD + await self.handlers[question["do"]](question, at_end)
        except NormserveError as error:
            return _BAD + error.detail.encode()
        except Exception:
            log.exception("unexpected error in a message of another process")
            return _BAD + b"an error of its own"


def _is_same_user(writer: asyncio.StreamWriter) -> bool:
    """Return whether the process at the other end belongs to this process's user.  This is a second check,
    as the folder already excludes other users.
    """
    connected = writer.get_extra_info("socket")
    _, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
