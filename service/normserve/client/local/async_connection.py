"""A connection of the asynchronous client, which its tasks share."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from normserve.client.errors import ConnectionFailedError
from normserve.client.local.client_protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.local.device_arena import BusyStream
from normserve.client.local.sockets import RECEIVED_AT_ONCE
from normserve.client.quoting import quote_text
from normserve.codec.framing import SendQueue
from normserve.codec.local_messages import LazyLocalResponse
from normserve.socket_readers import add_reader

_R = TypeVar("_R")


class AsyncLocalClientConnection:
    """A connected socket, shared by tasks that wait for their responses.

    Attributes:
        protocol, call_caches, is_open: as of `link.LocalClientConnection`.
    """

    def __init__(self, api_key: str | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self.protocol = LocalClientProtocol(api_key)
        self.call_caches = self.protocol.call_caches
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._send_queue = SendQueue()

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and belongs to the running event loop."""
        return self.is_open and self._is_on_own_loop()

    def _is_on_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def connect(self, path: str) -> None:
        """Connect and exchange greetings; raise ClientError if the server is unreachable or refuses this client."""
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
            await self.run_exchanges(self.protocol.exchange_hello())
        except BaseException as error:
            self.protocol.fail(partial(ConnectionFailedError, quote_text(str(error), 200)))
            self._close()
            raise

    async def run_exchanges(self, exchanges: Exchanges[_R]) -> _R:
        """Do as `link.LocalClientConnection.run_exchanges`."""
        reply = None
        try:
            while True:
                step = exchanges.send(reply)
                if isinstance(step, BusyStream):
                    reply = None
                    await asyncio.to_thread(step.wait_idle)
                else:
                    reply = await self.send_and_wait(step)
        except StopIteration as done:
            result: _R = done.value
            return result

    async def send_and_wait(self, request: LocalRequest) -> LazyLocalResponse:
        """Do as `link.LocalClientConnection.send_and_wait`."""
        protocol = self.protocol
        if protocol.make_failure is not None:
            raise protocol.make_failure()
        pending, frame = protocol.begin_request(request)
        answered = self._loop.create_future()
        pending.on_done = partial(_resolve, answered)
        self._send(frame)
        try:
            if request.on_sent is not None:
                request.on_sent()
            await answered
        except BaseException:
            if self.is_open:
                self._send(protocol.encode_cancel(pending))
            raise
        if pending.response is None:
            assert protocol.make_failure is not None
            raise protocol.make_failure()
        return pending.response

    def close_when_unused(self) -> None:
        """Close the connection once no result or pending call has a block of the arenas."""
        self.protocol.release_retained()
        if self.is_open:
            self.protocol.call_when_unused(partial(self._call_on_loop, self._free_segments_and_close))

    def _call_on_loop(self, work: Callable[[], None]) -> None:
        """Call `work` on the connection's event loop, or here if that is closed or running in this thread."""
        if self._loop.is_closed() or self._is_on_own_loop():
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def _free_segments_and_close(self) -> None:
        """Free all segments, which have no views left, and close the connection."""
        if self.is_open:
            self._try_send(self.protocol.encode_free_all())
            self._close()
            if not self._loop.is_closed():
                self.protocol.fail(partial(ConnectionFailedError, "the connection has ended"))

    def _try_send(self, frame: bytes) -> None:
        """Send a frame that has no response, if the kernel accepts it without a wait."""
        if frame:
            with suppress(OSError):
                self._socket.send(frame)

    def _send(self, frame: bytes) -> None:
        try:
            self._send_queue.add_and_send_all(self._socket, frame)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._send_queued)
        except OSError:
            # The server may have sent its reason for closing, which is received as a response.
            self._send_queue.discard_all()

    def _send_queued(self) -> None:
        try:
            self._send_queue.send_all(self._socket)
        except BlockingIOError:
            return
        except OSError:
            self._send_queue.discard_all()
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        protocol = self.protocol
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVED_AT_ONCE)
            protocol.receive_data(data, ancillary, flags)
        except BlockingIOError:
            return
        except OSError as error:
            protocol.fail(partial(ConnectionFailedError, quote_text(str(error), 200)))
        if protocol.make_failure is not None:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self.protocol.close_descriptors()
        self._socket.close()


def _resolve(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)
