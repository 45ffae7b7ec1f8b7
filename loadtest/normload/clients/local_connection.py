"""A connection of the load test to a server on the same host that shares memory with it.

It is driven by steps, like `Connection`.  It has one request at a time, so all have the same tag and a repeated
request has the same bytes: its tensors stay in the arena where they were first placed.
"""

import socket
from collections import OrderedDict
from dataclasses import dataclass

from normserve.client.answers.answer import Answer
from normserve.client.http.opening import connecting
from normserve.client.http.steps import READ, WRITE, Steps
from normserve.client.local.arena import Arena, Block
from normserve.client.local.messages import growth, prepare, understood
from normserve.client.local.sockets import Incoming
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import VERSION

from normload.clients.connection import Waiting
from normload.clients.pool import Request

_TAG = 1

# Tensors and results of requests that a connection leaves in its arena, which the server counts against a quota.
_KEPT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request whose tensors are in the arena.

    Attributes:
        frame: of the request.
        inputs: blocks of its tensors.
        results: blocks of its results.
    """

    frame: bytes
    inputs: list[Block]
    results: dict[str, Block]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (*self.inputs, *self.results.values()))


class _RefusedError(Exception):
    """The server responded with an error to a message other than the request."""

    def __init__(self, answer: frames.Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class LocalConnection(Waiting):
    """Opens itself at its first use, and again after it broke or was closed."""

    def __init__(self, path: str, api_key: str | None, timeout_s: float) -> None:
        """Args:
        path: of the server's socket.
        api_key: sent to the server if it is not None.
        timeout_s: longest time of an exchange, from connecting to the response.
        """
        super().__init__(timeout_s)
        self._path = path
        self._api_key = api_key
        self._open: _Link | None = None
        self._placed: OrderedDict[int, _Placed] = OrderedDict()
        # The request of the last response, and the blocks of its results.
        self._last: tuple[int, dict[str, Block]] | None = None

    def steps(self, request: Request) -> Steps[Answer]:
        """As `Connection.steps`; the results of its response are valid until the next exchange."""
        if self._last is not None:
            # Only the figures of the earlier response are still read; its blocks are needed again.
            self._last[1].clear()
            self._last = None
        if self._open is not None and not self._open.is_quiet():
            self.close()
        try:
            if self._open is None:
                self._open = _Link()
                yield from self._open.begin(self._path, self._api_key)
            placed = self._placed.get(id(request))
            if placed is None:
                placed = yield from self._place(self._open, request)
            told = yield from self._open.request(placed.frame)
        except _RefusedError as refused:
            self.close()
            return understood(refused.answer, {})
        except BaseException:
            self.close()
            raise
        results = dict(placed.results)
        self._last = id(request), results
        return understood(told, results)

    def leave(self) -> None:
        """Leave the results of the last response to the caller."""
        if self._last is not None:
            self._placed.pop(self._last[0], None)
            self._last = None

    def close(self) -> None:
        """Close it, if it is open."""
        self._placed.clear()
        self._last = None
        if self._open is not None:
            self._open.close()
            self._open = None

    def _place(self, link: "_Link", request: Request) -> Steps[_Placed]:
        """Copy a request's tensors into the arena, in place of others if it is full."""
        assert request.call is not None
        kept = sum(placed.nbytes for placed in self._placed.values())
        while self._placed and kept + request.nbytes + request.most_bytes > _KEPT_BYTES:
            kept -= self._placed.popitem(last=False)[1].nbytes
        needs = prepare(request.call, link.arena)
        try:
            while True:
                yield from link.grow(next(needs))
        except StopIteration as done:
            prepared = done.value
        placed = _Placed(frames.write(_TAG, prepared.message), prepared.inputs, dict(prepared.results))
        self._placed[id(request)] = placed
        return placed


class _Link:
    """A connected socket and its arena."""

    def __init__(self) -> None:
        self.arena = Arena()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._incoming = Incoming(self._socket, self.arena)
        # Whether the server may still write to the arena.
        self._is_asked = False

    def begin(self, path: str, api_key: str | None) -> Steps[None]:
        """Connect and exchange greetings."""
        yield from connecting(self._socket, path)
        _require((yield from self.request(frames.write(_TAG, frames.Hello(VERSION, api_key)))))

    def is_quiet(self) -> bool:
        """Whether nothing was received between requests, such as the connection's end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def request(self, frame: bytes) -> Steps[frames.Answer]:
        """Send a frame and wait for its response.

        Raises:
            _RefusedError: the server refuses the connection.
            ClientError, OSError: the connection has ended, or cannot be used any more.
        """
        self._is_asked = True
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                yield self._socket.fileno(), WRITE
            except BrokenPipeError:
                # The server may have sent a reason before it closed.
                break
        while True:
            yield self._socket.fileno(), READ
            try:
                found = self._incoming.receive()
            except BlockingIOError:
                continue
            for tag, answer in found:
                if tag == _TAG:
                    self._is_asked = False
                    return answer
                if not tag and answer.status >= 400:
                    raise _RefusedError(answer)

    def grow(self, lacking: int) -> Steps[None]:
        """Request another segment of at least `lacking` bytes.

        Raises:
            _RefusedError: the server grants no more memory.
        """
        sizes = growth(lacking, self.arena.nbytes)
        answer = yield from self._request_segment(sizes[0])
        if answer.status >= 400 and sizes[1] < sizes[0]:
            answer = yield from self._request_segment(sizes[1])
        _require(answer)

    def _request_segment(self, nbytes: int) -> Steps[frames.Answer]:
        message = frames.Grow(nbytes)
        self._incoming.expect(_TAG, message)
        return (yield from self.request(frames.write(_TAG, message)))

    def close(self) -> None:
        """End the connection, and free its memory once nothing refers to it."""
        self._incoming.close()
        if self._is_asked:
            self._socket.close()
        else:
            self.arena.once_empty(self._leave)

    def _leave(self) -> None:
        try:
            for number in self.arena.segments:
                self._socket.send(frames.write(0, frames.Free(number)))
        except OSError:
            return
        finally:
            self._socket.close()


def _require(answer: frames.Answer) -> None:
    if answer.status >= 400:
        raise _RefusedError(answer)
