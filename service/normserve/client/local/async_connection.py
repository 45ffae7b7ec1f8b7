"""The asynchronous client's calls over shared memory, and its connection, which its tasks share."""

import asyncio
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.errors import ConnectionFailedError
from normserve.client.local.call_cache import CallCache, Signature
from normserve.client.local.client_protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.local.connection import RECEIVED_AT_ONCE
from normserve.client.local.device_arena import BusyStream
from normserve.client.quoting import sanitise_text
from normserve.client.responses.api_response import ApiResponse
from normserve.codec.framing import SendQueue
from normserve.codec.local_messages import LazyLocalResponse
from normserve.memory.tensors import DType
from normserve.socket_readers import add_persistent_reader

_R = TypeVar("_R")


class AsyncLocalClientConnection:
    """A connection to a server on the same host, shared by tasks that wait for their responses.

    Messages pass through a Unix socket, tensors through shared memory.

    Attributes:
        protocol: the requests, responses and memory of the connection.
        call_caches: those of the protocol.
        is_open: whether the connection has neither failed nor been closed.
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
        """Return whether the event loop that runs in this thread is the connection's."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def connect(self, path: str) -> None:
        """Connect to the server's Unix socket and exchange greetings.

        Raises:
            ClientError: the server is not reachable, or refuses this client.
        """
        try:
            await self._loop.sock_connect(self._socket, path)
        except OSError as error:
            self._socket.close()
            raise ConnectionFailedError(sanitise_text(f"{path}: {error}", 200)) from error
        except BaseException:
            self._socket.close()
            raise
        add_persistent_reader(self._loop, self._socket, self._receive)
        try:
            await self.run_exchanges(self.protocol.exchange_hello_and_read_offer())
        except BaseException as error:
            self.protocol.fail(partial(ConnectionFailedError, sanitise_text(str(error), 200)))
            self._close()
            raise

    async def run_exchanges(self, exchanges: Exchanges[_R]) -> _R:
        """Send each request that a generator yields, and pass the response back to the generator.  Return the
        generator's result.

        If the generator yields a CUDA stream, wait until the stream's work is finished.

        Raises:
            ClientError: as `send_and_wait`, or an error that the generator raises.
        """
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
        """Send a request and wait for its response; cancel the request if the wait is interrupted.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended or failed.
        """
        protocol = self.protocol
        if protocol.make_failure is not None:
            raise protocol.make_failure()
        pending, frame = protocol.register_request(request)
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
        """Close the connection as soon as no array or call uses its shared memory, at once if none does.

        Memory that is kept only for pending requests is released first, because their responses may never
        arrive.
        """
        self.protocol.release_pending_memory()
        if self.is_open:
            self.protocol.call_when_unused(partial(self._call_or_enqueue_on_loop, self._free_segments_and_close))

    def _call_or_enqueue_on_loop(self, work: Callable[[], None]) -> None:
        """Call `work` at once, or have the connection's event loop call it.

        Call it directly if this thread runs the loop, or if the loop is closed.
        """
        if self._loop.is_closed() or self._is_on_own_loop():
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def _free_segments_and_close(self) -> None:
        """Ask the server to free all segments, which must be unused, and close the connection."""
        if self.is_open:
            self._send_or_drop(self.protocol.encode_free_all())
            self._close()
            if not self._loop.is_closed():
                self.protocol.fail(partial(ConnectionFailedError, "the connection has ended"))

    def _send_or_drop(self, frame: bytes) -> None:
        """Send a frame that needs no response; drop it if the socket would block or has failed."""
        if frame:
            with suppress(OSError):
                self._socket.send(frame)

    def _send(self, frame: bytes) -> None:
        """Send a frame; the event loop sends the bytes that the socket does not accept at once.

        After a socket error the remaining bytes are dropped without an exception: the server's reason for
        closing may still arrive as a response.
        """
        try:
            self._send_queue.add_and_send_all(self._socket, frame)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._send_queued)
        except OSError:
            # The server may have sent its reason for closing, which is received as a response.
            self._send_queue.discard_all()

    def _send_queued(self) -> None:
        """Send queued bytes; the event loop calls this when the socket is writable, until no bytes are left."""
        try:
            self._send_queue.send_all(self._socket)
        except BlockingIOError:
            return
        except OSError:
            self._send_queue.discard_all()
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        """Receive available data; the event loop calls this when the socket is readable.

        If the connection has failed, close it.
        """
        protocol = self.protocol
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVED_AT_ONCE)
            protocol.deliver_responses(data, ancillary, flags)
        except BlockingIOError:
            return
        except OSError as error:
            protocol.fail(partial(ConnectionFailedError, sanitise_text(str(error), 200)))
        if protocol.make_failure is not None:
            self._close()

    def _close(self) -> None:
        """Close the socket and the received descriptors; the shared memory stays mapped."""
        self.is_open = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self.protocol.close_descriptors()
        self._socket.close()


def _resolve(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)


class AsyncLocalTransport:
    """An `AsyncCallTransport` that sends calls to a server on the same host, with their tensors in shared
    memory.
    """

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connect_lock = asyncio.Lock()
        self._connection: AsyncLocalClientConnection | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., AsyncLocalTransport] | None = None

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call and return its response, whatever its status.  The tensors of both are in shared memory.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the server sent invalid data.
        """
        return await self._run_exchanges(lambda protocol: protocol.exchange_call(call), deadline)

    def get_usable_connection(self) -> AsyncLocalClientConnection | None:
        """Return the connection if there is a usable one; otherwise None."""
        link = self._connection
        return link if link is not None and link.is_usable else None

    async def try_exchange_cached(
        self, link: AsyncLocalClientConnection, cache: CallCache, signature: Signature, deadline: Deadline
    ) -> Any:
        """Repeat a call by sending its cached message again.  Return the call's result, or None if the caller must
        build and send the call.

        None means that the call is not cached, the connection is closed, memory is lacking, or the results have
        another shape or dtype than those of the earlier call.

        Args:
            link, cache: the connection, and its cache of calls.
            signature: the key of the call, and the tensors to copy.

        Raises:
            ClientError: there is no response, or it is an error.
        """
        key, elsewhere = signature
        cached_call = cache.calls.get(key)
        if cached_call is None or not link.is_open:
            return None
        try:
            async with deadline.make_asyncio_timeout():
                if busy := cache.find_busy_stream():
                    await asyncio.to_thread(busy.wait_idle)
                pending_call = cache.try_prepare_call(cached_call, elsewhere)
                if pending_call is None:
                    return None
                if elsewhere and (busy := cache.find_busy_stream()):
                    await asyncio.to_thread(busy.wait_idle)
                reply = await link.send_and_wait(
                    LocalRequest(pending_call.content, pending_call, pending_call.make_result_arrays)
                )
        except TimeoutError:
            raise deadline.make_error() from None
        return cache.try_finish_call(key, pending_call, reply, self._api_key)

    async def allocate_memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Allocate host memory shared with the server; it is freed after the last view of the returned buffer.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        return await self._run_exchanges(lambda protocol: protocol.allocate_memory(nbytes), deadline)

    async def try_allocate_device_tensor(
        self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline
    ) -> Any:
        """Allocate a tensor in a device's shared memory; return None if the server shares no memory of that device.

        The server adds memory only if there is no space in the memory that is shared already.

        Args: index: the device's, as torch counts.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        return await self._run_exchanges(
            lambda protocol: protocol.try_allocate_device_tensor(index, dtype, shape), deadline
        )

    async def _run_exchanges(
        self, exchanges: Callable[[LocalClientProtocol], Exchanges[_R]], deadline: Deadline
    ) -> _R:
        """Send the requests that a generator yields, within the deadline, and return the generator's result.  A
        connection is opened first if none is usable.
        """
        try:
            async with deadline.make_asyncio_timeout():
                link = await self._get_or_open_connection()
                return await link.run_exchanges(exchanges(link.protocol))
        except TimeoutError:
            raise deadline.make_error() from None

    async def close(self) -> None:
        """Give up the connection, which closes once no array uses its shared memory."""
        self._closed = True
        self._retire_connection()
        self._connection = None

    async def _get_or_open_connection(self) -> AsyncLocalClientConnection:
        """Return the current connection if it is usable.  Otherwise open a new one, and give up the current one.

        Raises:
            RuntimeError: the client is closed.
            ClientError: the server is not reachable, or refuses this client.
        """
        link = self._connection
        if link is not None and link.is_usable:
            return link
        async with self._connect_lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._connection is None or not self._connection.is_usable:
                link = AsyncLocalClientConnection(self._api_key)
                await link.connect(self._path)
                self._retire_connection()
                self._connection = link
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.close_when_unused)
            return self._connection

    def _retire_connection(self) -> None:
        """Give up the current connection, if any; it closes as soon as its shared memory is unused."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._connection is not None:
            self._connection.close_when_unused()
