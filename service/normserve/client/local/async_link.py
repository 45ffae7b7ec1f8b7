"""A connection of the asynchronous client, which its tasks share."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from normserve.client.errors import ConnectionFailedError
from normserve.client.local.device import BusyStream
from normserve.client.local.protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.local.sockets import RECEIVED_AT_ONCE
from normserve.client.quoting import quote_text
from normserve.codec.framing import SendQueue
from normserve.codec.local_frames import LazyLocalResponse
from normserve.sockets import add_reader

_R = TypeVar("_R")


class AsyncLocalClientConnection:
    """A connected socket, and the tasks that wait for responses on it.

    Attributes:
        protocol, recurring, is_open: as of `link.Link`.
    """

    def __init__(self, api_key: str | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self.protocol = LocalClientProtocol(api_key)
        self.recurring = self.protocol.recurring
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._outgoing = SendQueue()

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and of the event loop that runs."""
        return self.is_open and self._is_here()

    def _is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def connect(self, path: str) -> None:
        """Raises: ClientError: the server is not there, or does not want this client."""
        try:
            await self._loop.sock_connect(self._socket, path)
        except OSError as error:
            self._socket.close()
            raise ConnectionFailedError(quote_text(f"{path}: {error}", 200)) from error
        except BaseException:
            self._socket.close()
            raise
        add_reader(self._loop, self._socket, self._receive)
        try:
            await self.run(self.protocol.greet())
        except BaseException as error:
            self.protocol.fail(partial(ConnectionFailedError, quote_text(str(error), 200)))
            self._close()
            raise

    async def run(self, exchanges: Exchanges[_R]) -> _R:
        """As `link.Link.run`."""
        reply = None
        try:
            while True:
                step = exchanges.send(reply)
                if isinstance(step, BusyStream):
                    reply = None
                    await asyncio.to_thread(step.wait)
                else:
                    reply = await self.request(step)
        except StopIteration as done:
            result: _R = done.value
            return result

    async def request(self, request: LocalRequest) -> LazyLocalResponse:
        """As `link.Link.request`."""
        protocol = self.protocol
        if protocol.failure is not None:
            raise protocol.failure()
        pending, frame = protocol.begin(request)
        answered = self._loop.create_future()
        pending.wake = partial(_resolve, answered)
        self._send(frame)
        try:
            if request.meanwhile is not None:
                request.meanwhile()
            await answered
        except BaseException:
            if self.is_open:
                self._send(protocol.cancel(pending))
            raise
        if pending.reply is None:
            assert protocol.failure is not None
            raise protocol.failure()
        return pending.reply

    def retire(self) -> None:
        """Close, once nobody has a block of the arenas: neither a result nor a call that still waits."""
        self.protocol.drop_used()
        if self.is_open:
            self.protocol.once_unused(partial(self._from_anywhere, self._leave))

    def _from_anywhere(self, work: Callable[[], None]) -> None:
        """A block may return on any thread, and its event loop may be over."""
        if self._loop.is_closed() or self._is_here():
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def _leave(self) -> None:
        """Give the arena back: no view of it is left."""
        if self.is_open:
            self._send_last(self.protocol.leave())
            self._close()
            if not self._loop.is_closed():
                self.protocol.fail(partial(ConnectionFailedError, "the connection has ended"))

    def _send_last(self, frame: bytes) -> None:
        """Send what has no response, if the kernel takes it."""
        if frame:
            with suppress(OSError):
                self._socket.send(frame)

    def _send(self, frame: bytes) -> None:
        try:
            self._outgoing.push(self._socket, frame)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._send_rest)
        except OSError:
            # The server may have said why it closed; what is received says that.
            self._outgoing.close()

    def _send_rest(self) -> None:
        try:
            self._outgoing.send(self._socket)
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.close()
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        protocol = self.protocol
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVED_AT_ONCE)
            protocol.receive(data, ancillary, flags)
        except BlockingIOError:
            return
        except OSError as error:
            protocol.fail(partial(ConnectionFailedError, quote_text(str(error), 200)))
        if protocol.failure is not None:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self.protocol.close()
        self._socket.close()


def _resolve(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)
