"""Drives one real `Connection` in process: bytes in, in any cuts, and what became of them out.

No socket is read: a `Wire` stands in for the transport, and the loop runs between the pieces until nothing happens
any more.  `feed(pieces)` is all that most callers need; the same bytes must give the same events, however they are
cut.
"""

import asyncio
import functools
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import uvicorn
from normserve.errors import NormserveError
from normserve.http.problem_responses import render_problem_response
from normserve.http.transport import ConnectionPolicy, ConnectionTimeouts, DiscardLimits, make_connection_factory
from normserve.http.transport.idle_connections import IdleConnectionQueue
from uvicorn.server import ServerState


@dataclass(frozen=True)
class Request:
    """A request that came whole, as the application saw it."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A response or a refusal: its status and, of a refusal, the code of the error."""

    status: int
    code: str = ""


@dataclass(frozen=True)
class Closed:
    """The server has closed the connection."""


Event = Request | Answer | Closed

_ANSWER = re.compile(rb"HTTP/1\.1 (\d+) [^\r]*\r\n(?:content-type: (\S+json))?")
_SLAB_STEPS = 1024
_PATIENCE = ConnectionTimeouts(60, 60, 60)
_STEPS_UNTIL_QUIET = 12


class Wire:
    """A transport whose other side is the caller."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = False
        self.is_reading = True
        self._pair = socket.socketpair()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._pair[0] if name == "socket" else default

    def write(self, data: bytes | memoryview) -> None:
        self.written += data

    def writelines(self, buffers: Iterable[bytes | memoryview]) -> None:
        for buffer in buffers:
            self.written += buffer

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def release(self) -> None:
        for end in self._pair:
            end.close()


class Application:
    """Receives each request whole, as the routes do, and answers 200 with its body's length."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def serve(self, scope, send) -> None:
        reception, sending = scope["state"]["reception"], scope["state"]["sending"]
        try:
            body = bytes(await reception.receive_into(self._slab, pause_s=60, total_s=60))
        except NormserveError:
            # The connection says the rest.
            return
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.requests.append(Request(scope["method"], target, tuple(scope["headers"]), body))
        answer = b"%d" % len(body)
        await sending.send_response(200, [(b"content-length", b"%d" % len(answer))], [answer], len(answer))

    @staticmethod
    def _slab(nbytes: int) -> memoryview:
        # Memory as a pool would give it: for a body whose length is not known it grows in steps.
        return memoryview(bytearray(min(-(-nbytes // _SLAB_STEPS) * _SLAB_STEPS, 2**24) or _SLAB_STEPS))


async def _entrance(scope, receive, send) -> None:
    await scope["state"]["application"].serve(scope, send)


@functools.cache
def _config() -> uvicorn.Config:
    config = uvicorn.Config(_entrance, ws="none", access_log=False, log_config=None, lifespan="off")
    config.load()
    return config


class Driver:
    """One connection and its application, on a loop of their own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        application: Application | None = None,
        patience: ConnectionTimeouts = _PATIENCE,
        drains: DiscardLimits | None = None,
        idle: IdleConnectionQueue | None = None,
        admission: tuple[str, str | None] = ("a", None),
    ) -> None:
        self._loop = loop
        self.application = application or Application()
        self.refusals: list[NormserveError] = []
        self.wire = Wire()
        self.idle = idle or IdleConnectionQueue()
        accept = make_connection_factory(
            ConnectionPolicy(patience, drains or DiscardLimits(2**20), self._refuse, lambda: None, self.idle)
        )
        state, server = {"application": self.application}, ServerState()
        self.connection = accept(config=_config(), server_state=server, app_state=state, _loop=loop)
        self.header_s = self.connection.admit(*admission)
        self.connection.connection_made(self.wire)
        (self.protocol,) = server.connections

    def _refuse(self, error: NormserveError, target: str) -> bytes:
        self.refusals.append(error)
        return render_problem_response(error, target)

    async def receive(self, data: bytes) -> None:
        """Bytes arrive: as many at a time as the connection has room for, while it reads."""
        while data and not self.wire.is_closed:
            if not self.wire.is_reading:
                await self.settle()
                if not self.wire.is_reading:
                    # Nothing will make it read again: what is left stays with the kernel.
                    return
                continue
            room = self.connection.get_buffer(-1)
            piece, data = data[: len(room)], data[len(room) :]
            room[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))

    async def settle(self) -> None:
        """Let everything happen that can."""
        before = None
        while before != (now := (len(self.wire.written), len(self.application.requests))):
            before = now
            for _ in range(_STEPS_UNTIL_QUIET):
                await asyncio.sleep(0)

    async def end(self) -> bool:
        """The client ends its side; whether the connection stays open."""
        stays = not self.wire.is_closed and bool(self.connection.eof_received())
        if not stays:
            self.wire.close()
        await self.settle()
        return stays

    async def lose(self) -> None:
        """The connection is gone."""
        self.wire.close()
        self.connection.connection_lost(None)
        await self.settle()
        self.wire.release()

    def events(self) -> list[Event]:
        """What has become of the bytes so far: requests in order, then answers in order, then the end."""
        codes = iter(self.refusals)
        answers: list[Event] = []
        for status, problem in _ANSWER.findall(self._answered()):
            answers.append(Answer(int(status), next(codes).code if problem else ""))
        ends: list[Event] = [Closed()] if self.wire.is_closed else []
        return [*self.application.requests, *answers, *ends]

    def _answered(self) -> bytes:
        written = bytes(self.wire.written)
        # Where the header of a refusal names its type; a leave to go on is no answer.
        written = written.replace(b"x-content-type-options: nosniff\r\n", b"")
        return written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


async def drive(pieces: Sequence[bytes], *, settles: bool = True, ends: bool = False) -> list[Event]:
    """Feed the pieces to a fresh connection on the running loop.

    Args:
        settles: the application runs between the pieces, too, and not only after the last.
        ends: the client then ends its side.
    """
    driver = Driver(asyncio.get_running_loop())
    try:
        for piece in pieces:
            await driver.receive(piece)
            if settles:
                await driver.settle()
        await (driver.end() if ends else driver.settle())
        return driver.events()
    finally:
        await driver.lose()


def feed(pieces: Sequence[bytes], *, settles: bool = True, ends: bool = False) -> list[Event]:
    """The same on a loop that is made for it."""
    return asyncio.run(drive(pieces, settles=settles, ends=ends))


def view(events: Sequence[Event]) -> SimpleNamespace:
    """Events by their kind: `requests`, `statuses`, `codes` of refusals, `closed`."""
    answers = [event for event in events if isinstance(event, Answer)]
    return SimpleNamespace(
        requests=[event for event in events if isinstance(event, Request)],
        statuses=[answer.status for answer in answers],
        codes=[answer.code for answer in answers if answer.code],
        closed=any(isinstance(event, Closed) for event in events),
    )
