"""The blocking client's calls over shared memory, and its connection, which its threads share.

The thread that receives polls for a response if the last one arrived quickly, and otherwise sleeps in the operating
system.
"""

import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError, ConnectionFailedError, RequestTimeoutError
from normserve.client.local.call_cache import CallCache, Signature
from normserve.client.local.client_protocol import Exchanges, LocalClientProtocol, LocalRequest, PendingLocalRequest
from normserve.client.local.device_arena import BusyStream
from normserve.client.quoting import sanitise_text
from normserve.client.responses.api_response import ApiResponse
from normserve.codec.framing import SendQueue, compute_ancillary_bytes
from normserve.codec.local_messages import LazyLocalResponse
from normserve.memory.tensors import DType

_READ_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 4
# As enumerations these take a microsecond each time.
_CLOSE_ON_EXEC, _AT_ONCE = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_DONTWAIT)
_RECEIVED = _READ_BYTES, compute_ancillary_bytes(_MOST_DESCRIPTORS), _CLOSE_ON_EXEC
#: Arguments of `recvmsg` for a reception without a wait.
RECEIVED_AT_ONCE = _READ_BYTES, compute_ancillary_bytes(_MOST_DESCRIPTORS), _CLOSE_ON_EXEC | _AT_ONCE

# A response within the first time, waking included, might have been polled for; the second is how long to poll.  On
# virtual machines waking alone can take 0.2 ms.
_SOON_S, _POLLED_S = 400e-6, 300e-6
# On one core the server would wait meanwhile.
_MAY_POLL = len(os.sched_getaffinity(0)) > 1
#: The shortest timeout; shorter ones might be rounded to 0, which is no timeout.
_SHORTEST_WAIT_S = 1e-4

# How long a wait in the operating system lasts before the deadline is looked at again.
_WAIT_S = 1.0
_TIMEVAL = struct.Struct("ll")


class PollingReceiver:
    """A receiver on a blocking socket; it polls for a short time before it sleeps if responses arrive quickly.

    Attributes:
        is_prompt: the last response arrived quickly, so the next one is polled for.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self.is_prompt = False
        # For how long the one that is waited for was polled for, in vain.
        self._polled_s = 0.0

    def receive(self) -> Any:
        """Call `recvmsg` and return its result.  If the last response arrived quickly, poll for data; otherwise
        sleep until data arrive.

        Raises:
            BlockingIOError: nothing arrived in time; the next call sleeps until something does.
        """
        return self._receive_by_polling() if self.is_prompt else self._receive_by_sleeping()

    def _receive_by_polling(self) -> Any:
        """Receive by polling for a short time.

        A thread that sleeps takes longer to wake than a server with a GPU takes for a small request.  Other threads
        that want to run on this core do so meanwhile.

        Raises: BlockingIOError: nothing arrived.
        """
        receive = self._connected.recvmsg
        try:
            return receive(*RECEIVED_AT_ONCE)
        except BlockingIOError:
            give_up = time.perf_counter() + _POLLED_S
        while True:
            os.sched_yield()
            try:
                return receive(*RECEIVED_AT_ONCE)
            except BlockingIOError:
                if time.perf_counter() > give_up:
                    self.is_prompt, self._polled_s = False, _POLLED_S
                    raise

    def _receive_by_sleeping(self) -> Any:
        """Receive by sleeping in the operating system until data arrive or the socket's timeout passes.

        The time that this takes determines whether the next reception polls.
        """
        began = time.perf_counter() - self._polled_s
        received = self._connected.recvmsg(*_RECEIVED)
        self.is_prompt, self._polled_s = _MAY_POLL and time.perf_counter() - began <= _SOON_S, 0.0
        return received


_R = TypeVar("_R")

# The number of this process, which costs a system call: it is another only after a fork.
_process = os.getpid()


def _update_process_id() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_update_process_id)


class LocalClientConnection:
    """A connection to a server on the same host, shared by threads that wait for their responses.

    Messages pass through a Unix socket, tensors through shared memory.  One of the waiting threads receives
    for all of them.

    Attributes:
        protocol: the requests, responses and memory of the connection.
        call_caches: those of the protocol.
        is_open: whether the connection has neither failed nor been closed.
    """

    def __init__(self, path: str, api_key: str | None, deadline: Deadline) -> None:
        """Connect and exchange greetings.

        Raises:
            ClientError: the server is not reachable, or refuses this client.
        """
        self._socket = socket.socket(socket.AF_UNIX)
        self.protocol = LocalClientProtocol(api_key)
        self.call_caches = self.protocol.call_caches
        self.is_open = True
        self._owner_process_id = _process
        self._send_lock = threading.Lock()
        self._send_queue = SendQueue()
        # Entered directly where no thread waits: a condition is Python code around it.
        self._lock = threading.Lock()
        self._received = threading.Condition(self._lock)
        self._is_receiving = False
        self._waiting_count = 0
        self._wait_s = _WAIT_S
        self._write_poll = select.poll()
        self._write_poll.register(self._socket, select.POLLOUT)
        self._receiver = PollingReceiver(self._socket)
        try:
            self._set_receive_timeout(_WAIT_S)
            # A server that accepts nobody is waited for so long.
            wait_s = max(_SHORTEST_WAIT_S, min(_WAIT_S, deadline.get_remaining_s() or _WAIT_S))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _pack_timeval(wait_s))
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            deadline.check()
            raise ConnectionFailedError(sanitise_text(f"{path}: {error}", 200)) from error
        try:
            self.run_exchanges(self.protocol.exchange_hello_and_read_offer(), deadline)
        except BaseException:
            self._close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and was made by this process, not by its parent before a fork."""
        return self.is_open and self._owner_process_id == _process

    def run_exchanges(self, exchanges: Exchanges[_R], deadline: Deadline) -> _R:
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
                    step.wait_idle()
                else:
                    reply = self.send_and_wait(step, deadline)
        except StopIteration as done:
            result: _R = done.value
            return result

    def send_and_wait(self, request: LocalRequest, deadline: Deadline) -> LazyLocalResponse:
        """Send a request and wait for its response; cancel the request if the wait is interrupted.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended or failed.
            RequestTimeoutError: there was no response in time.
        """
        pending, frame = self.protocol.register_request(request)
        try:
            self._send(frame, deadline)
            if request.on_sent is not None:
                request.on_sent()
            return self._wait_response(pending, deadline)
        except BaseException:
            if self.is_open:
                self._send_or_drop(self.protocol.encode_cancel(pending))
            raise

    def close_when_unused(self) -> None:
        """Close the connection as soon as no array or call uses its shared memory, at once if none does.

        Memory that is kept only for pending requests is released first, because their responses may never
        arrive.
        """
        self.protocol.release_pending_memory()
        self.protocol.call_when_unused(self._free_segments_and_close)

    def _send(self, frame: bytes, deadline: Deadline) -> None:
        """Send a frame, waiting until the deadline for the socket to accept it.

        After a socket error the remaining bytes are dropped without an exception: the server's reason for
        closing may still arrive as a response.

        Raises:
            RequestTimeoutError: the frame was not sent in time.
        """
        deadline.acquire_lock(self._send_lock)
        outgoing = self._send_queue
        try:
            try:
                outgoing.add_and_send_all(self._socket, frame, _AT_ONCE)
            except BlockingIOError:
                self._send_queued(deadline)
        except RequestTimeoutError:
            raise
        except OSError:
            # The server may have sent its reason for closing, which the receiving thread will read.
            outgoing.discard_all()
        finally:
            self._send_lock.release()

    def _send_queued(self, deadline: Deadline) -> None:
        """Send the queued bytes, waiting until the deadline for the socket to accept them.

        Raises:
            RequestTimeoutError: the deadline passed; if a frame was sent only in part, the connection has
                failed.
        """
        outgoing = self._send_queue
        while outgoing:
            if not self._wait_writable(deadline):
                if outgoing.has_partial_frame:
                    self._fail(partial(ConnectionFailedError, "a request was cut off"))
                outgoing.discard_all()
                raise deadline.make_error()
            with suppress(BlockingIOError):
                outgoing.send_all(self._socket, _AT_ONCE)

    def _send_or_drop(self, frame: bytes) -> None:
        """Send a frame that needs no response; drop it if the socket is full or another thread is sending."""
        if frame and self._send_lock.acquire(blocking=False):
            try:
                if not self._send_queue:
                    with suppress(OSError):
                        self._socket.send(frame, _AT_ONCE)
            finally:
                self._send_lock.release()

    def _wait_writable(self, deadline: Deadline) -> bool:
        """Wait until the socket is writable, for `_WAIT_S` at most and not beyond the deadline.

        Returns:
            False, without a wait, if the deadline has passed; otherwise True, even if the socket is still not
                writable.
        """
        remaining_s = deadline.get_remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            return False
        wait_s = _WAIT_S if remaining_s is None else min(_WAIT_S, remaining_s)
        self._write_poll.poll(math.ceil(wait_s * 1000))
        return True

    def _wait_response(self, pending: PendingLocalRequest, deadline: Deadline) -> LazyLocalResponse:
        """Wait for the response to a request, and return it.  If no other thread is receiving, this thread receives
        for all waiting threads.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended or failed.
            RequestTimeoutError: there was no response in time.
        """
        lock = self._lock
        while True:
            with lock:
                while pending.response is None and self._is_receiving:
                    self._wait_reception(deadline)
                if pending.response is not None:
                    return pending.response
                if self.protocol.make_failure is not None:
                    raise self.protocol.make_failure()
                self._is_receiving = True
            try:
                self._receive_until_any_answer(deadline)
            finally:
                with lock:
                    self._is_receiving = False
                    if self._waiting_count:
                        self._received.notify_all()
            if pending.response is not None:
                return pending.response

    def _wait_reception(self, deadline: Deadline) -> None:
        """Wait until the thread that is now receiving has stopped; the caller holds the lock.

        Raises:
            RequestTimeoutError: the deadline passed before.
        """
        self._waiting_count += 1
        try:
            if not self._received.wait(deadline.get_remaining_s()):
                raise deadline.make_error()
        finally:
            self._waiting_count -= 1

    def _receive_until_any_answer(self, deadline: Deadline) -> None:
        """Receive until the request of any thread is answered, or the connection has failed.

        Raises:
            RequestTimeoutError: the deadline of this thread's request passed before.
        """
        incoming, protocol = self._receiver, self.protocol
        while protocol.make_failure is None:
            if incoming.is_prompt:
                deadline.check()
            else:
                self._limit_receive_timeout(deadline)
            try:
                data, ancillary, flags, _ = incoming.receive()
                is_answered = protocol.deliver_responses(data, ancillary, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                self._fail(partial(ConnectionFailedError, sanitise_text(str(error), 200)))
                return
            except BaseException:
                # It is unknown whether bytes were received and lost.
                self._fail(partial(ConnectionFailedError, "an answer was lost to an interruption"))
                raise
            if protocol.make_failure is not None:
                self._close()
            if is_answered:
                return

    def _limit_receive_timeout(self, deadline: Deadline) -> None:
        """Set the socket's receive timeout to the time until the deadline, at most `_WAIT_S`.

        Raises:
            RequestTimeoutError: the deadline has passed.
        """
        remaining_s = deadline.get_remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            raise deadline.make_error()
        wait_s = _WAIT_S if remaining_s is None or remaining_s > _WAIT_S else remaining_s
        if wait_s != self._wait_s:
            self._set_receive_timeout(wait_s)

    def _set_receive_timeout(self, seconds: float) -> None:
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeval(max(seconds, _SHORTEST_WAIT_S))
        )
        self._wait_s = seconds

    def _fail(self, make_failure: Callable[[], ClientError]) -> None:
        self.protocol.fail(make_failure)
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self.protocol.close_descriptors()
        self._socket.close()

    def _free_segments_and_close(self) -> None:
        """Ask the server to free all segments, which must be unused, and close the connection.

        In a forked process only the socket is closed, because the parent still uses the segments.
        """
        if self.is_usable:
            self._send_or_drop(self.protocol.encode_free_all())
        self._close()


def _pack_timeval(seconds: float) -> bytes:
    whole_seconds = int(seconds)
    return _TIMEVAL.pack(whole_seconds, int((seconds - whole_seconds) * 1e6))


class LocalTransport:
    """A `CallTransport` that sends calls to a server on the same host, with their tensors in shared memory."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connect_lock = threading.Lock()
        self._connection: LocalClientConnection | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., LocalTransport] | None = None

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Send a call and return its response, whatever its status.  The tensors of both are in shared memory.

        Raises:
            ConnectionFailedError: no connection could be made, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the server sent invalid data.
        """
        link = self._get_or_open_connection(deadline)
        return link.run_exchanges(link.protocol.exchange_call(call), deadline)

    def get_usable_connection(self) -> LocalClientConnection | None:
        """Return the connection if there is a usable one; otherwise None."""
        link = self._connection
        return None if link is None or not link.is_usable else link

    def try_exchange_cached(
        self, link: LocalClientConnection, cache: CallCache, signature: Signature, deadline: Deadline
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
        # No `Exchanges`, which would take a tenth of the client's time.
        key, elsewhere = signature
        cached_call = cache.calls.get(key)
        if cached_call is None or not link.is_open:
            return None
        if busy := cache.find_busy_stream():
            busy.wait_idle()
        pending_call = cache.try_prepare_call(cached_call, elsewhere)
        if pending_call is None:
            return None
        if elsewhere and (busy := cache.find_busy_stream()):
            busy.wait_idle()
        reply = link.send_and_wait(
            LocalRequest(pending_call.content, pending_call, pending_call.make_result_arrays), deadline
        )
        return cache.try_finish_call(key, pending_call, reply, self._api_key)

    def allocate_memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Allocate host memory shared with the server; it is freed after the last view of the returned buffer.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._get_or_open_connection(deadline)
        return link.run_exchanges(link.protocol.allocate_memory(nbytes), deadline)

    def try_allocate_device_tensor(
        self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline
    ) -> Any:
        """Allocate a tensor in a device's shared memory; return None if the server shares no memory of that device.

        The server adds memory only if there is no space in the memory that is shared already.

        Args: index: the device's, as torch counts.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._get_or_open_connection(deadline)
        return link.run_exchanges(link.protocol.try_allocate_device_tensor(index, dtype, shape), deadline)

    def close(self) -> None:
        """Give up the connection, which closes once no array uses its shared memory."""
        with self._connect_lock:
            self._closed = True
            link, self._connection = self._connection, None
            if link is not None:
                self._detach_finalizer()
                link.close_when_unused()

    def _get_or_open_connection(self, deadline: Deadline) -> LocalClientConnection:
        """Return the usable connection; connect if there is none.

        Raises:
            RuntimeError: the client is closed.
            ClientError: the server is not reachable, or refuses this client.
        """
        link = self._connection
        if link is not None and link.is_usable:
            return link
        deadline.acquire_lock(self._connect_lock)
        try:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._connection is None or not self._connection.is_usable:
                self._detach_finalizer()
                self._connection = link = LocalClientConnection(self._path, self._api_key, deadline)
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.close_when_unused)
            return self._connection
        finally:
            self._connect_lock.release()

    def _detach_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
