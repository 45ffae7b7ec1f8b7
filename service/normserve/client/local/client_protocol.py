"""A connection to a server on the same host, without its socket: its requests, responses and memory.

A thread, an event loop or a load test drives it.  Each sends the bytes from `register_request`, passes received
bytes to `process_received`, and carries out `Exchanges`; each waits in its own way, and for as long as it chooses.
"""

import itertools
import os
import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from normserve.client.calls.api_call import ApiCall
from normserve.client.errors import ClientError, ConnectionFailedError, OverloadedError, UnexpectedAnswerError
from normserve.client.local.allocator import HostArena
from normserve.client.local.call_cache import CallCaches
from normserve.client.local.call_messages import (
    MISFIT_STATUS,
    HostArenaSteps,
    add_traceparent,
    allocate_host_block,
    list_segment_sizes,
    make_arena_response,
    make_local_api_error,
    prepare_host_call,
    raise_for_status,
)
from normserve.client.local.device_arena import BusyStream, DeviceArena, DeviceMemoryOffer
from normserve.client.local.device_messages import (
    DeviceArenaSteps,
    allocate_device_block,
    get_device_x,
    list_device_segment_sizes,
    make_device_response,
    prepare_device_call,
)
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import DOCUMENT_BYTES, LIST_BYTES
from normserve.client.trace_context import TRACING
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.codec.local_messages import TAGS, VERSION, LazyLocalResponse, Message
from normserve.errors import NormserveError
from normserve.memory.host_segments import map_segment
from normserve.memory.tensors import DType

_R = TypeVar("_R")


class LocalRequest(msgspec.Struct):
    """A message to send, and the objects to keep alive until its response arrives.

    Attributes:
        message: a `msgspec.Raw` is encoded already.
        retained: kept until the response arrives, even if the caller no longer waits for that.
        on_sent: called after sending, while the server works.
        freed_segments: numbers of segments that the server frees before it handles the message.
    """

    message: Message | msgspec.Raw
    retained: object = None
    on_sent: Callable[[], None] | None = None
    freed_segments: Sequence[int] = ()


Exchanges: TypeAlias = Generator[LocalRequest | BusyStream, Any, _R]
"""A generator that yields a request and is sent its `LazyLocalResponse`, or yields a stream to wait for."""


class PendingLocalRequest(msgspec.Struct):
    """A request that is waiting for its response.

    Attributes:
        retained: objects kept alive until the response arrives.
        response: the response; None until it arrives.
        on_done: called on the receiving thread when the request is answered, or the connection fails.
    """

    tag: int
    retained: object
    response: LazyLocalResponse | None = None
    on_done: Callable[[], None] | None = None


class LocalClientProtocol:
    """The requests, responses and shared memory (arenas) of a connection to a server on the same host, without the
    socket.

    An arena is the memory, of the host or of a device, that the connection shares with the server.  Threads
    may share one protocol if only one of them at a time calls `deliver_responses`.

    Attributes:
        arena: the arena in host memory.
        call_caches: repeatable calls, by the kind of their arrays.
        make_failure: makes the error with which the connection failed; None while it is usable.  Each caller
            gets an error of its own, because an error that was raised refers to the frames that it passed
            through.
    """

    def __init__(self, api_key: str | None) -> None:
        self.arena = HostArena()
        self.call_caches = CallCaches(self.arena)
        self.make_failure: Callable[[], ClientError] | None = None
        self._api_key = api_key
        self._device_offer = DeviceMemoryOffer()
        self._reader = FrameReader(DOCUMENT_BYTES)
        self._tags = itertools.count(1)
        self._pending: dict[int, PendingLocalRequest] = {}
        # Requests for a new segment, by their tags.
        self._pending_grows: dict[int, frames.GrowArenaMessage] = {}

    @property
    def has_pending(self) -> bool:
        """Whether the server may still write to the arenas."""
        return bool(self._pending)

    def register_request(self, request: LocalRequest) -> tuple[PendingLocalRequest, bytes]:
        """Register a request as pending and encode it; the caller sends the bytes.

        Returns:
            the pending request, whose `response` is set later, and the bytes to send.
        """
        message = request.message
        tag = next(self._tags) % (TAGS - 1) + 1
        frame = frames.encode_frame(tag, add_traceparent(message) if TRACING in sys.modules else message)
        if request.freed_segments:
            frame = _encode_frees(request.freed_segments) + frame
        if isinstance(message, frames.GrowArenaMessage):
            self._pending_grows[tag] = message
        elif isinstance(message, frames.ListLayersMessage):
            self._reader.max_bytes = LIST_BYTES
        pending = self._pending[tag] = PendingLocalRequest(tag, request.retained)
        return pending, frame

    def encode_cancel(self, pending: PendingLocalRequest) -> bytes:
        """Return the bytes to send when the caller stops waiting for a request."""
        return frames.encode_frame(0, frames.CancelRequestMessage(pending.tag))

    def deliver_responses(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> bool:
        """Process the data that `recvmsg` returned; return whether a request was answered.

        If the server ended the connection, refused it or sent invalid data, the connection has failed.

        Args: data, ancillary, flags: the result of `recvmsg`; empty data is the connection's end.
        """
        is_answered = False
        reader = self._reader
        if ancillary:
            reader.max_descriptors = len(self._pending_grows)
        try:
            for tag, content in reader.feed(data, ancillary, flags):
                reply = frames.decode_lazy_response(content)
                if self._pending_grows or reply.segment is not None:
                    self._map_segment(self._pending_grows.pop(tag, None), reply)
                pending = self._pending.pop(tag, None)
                if pending is not None:
                    pending.response = reply
                    is_answered = True
                    if pending.on_done is not None:
                        pending.on_done()
                elif not tag and reply.status >= 400:
                    self.fail(partial(make_local_api_error, reply))
                    break
        except (NormserveError, ValueError) as error:
            # A server's --uds and --local are easily taken for one another.
            hint = "; the socket speaks HTTP, use http+unix://PATH" if bytes(data[:5]) == b"HTTP/" else ""
            self.fail(partial(UnexpectedAnswerError, f"the server sent a malformed answer: {error}{hint}"))
        finally:
            if reader.descriptors:
                reader.close_unclaimed()
        if not data:
            self.fail(partial(ConnectionFailedError, "the server closed the connection"))
        return is_answered

    def fail(self, make_failure: Callable[[], ClientError]) -> None:
        """Mark the connection as failed and notify the waiting callers; do nothing if it has failed already.

        The shared memory stays mapped, since callers may still have views.

        Args: failure: makes the error that each caller raises.
        """
        if self.make_failure is not None:
            return
        self.make_failure = make_failure
        for pending in list(self._pending.values()):
            if pending.on_done is not None:
                pending.on_done()

    def close_descriptors(self) -> None:
        """Close received descriptors that were not used; the socket is closed."""
        self._reader.close()

    def release_pending_memory(self) -> None:
        """Drop the objects kept alive for all pending requests, because their responses may never arrive.

        Called before the connection closes; otherwise these objects would keep its memory in use.
        """
        # The server itself keeps the memory that it works in.
        for pending in list(self._pending.values()):
            pending.retained = None

    def call_when_unused(self, leave: Callable[[], None]) -> None:
        """Call `leave` as soon as no block of the arenas is in use, at once if none is.  Nothing may be allocated
        after this call.
        """
        self._device_offer.call_when_empty(self.arena, leave)

    def encode_free_all(self) -> bytes:
        """Unmap and free all segments, which must be unused; return the bytes to send."""
        return _encode_frees([*self.arena.segment_numbers, *self._device_offer.unmap_segments()])

    def exchange_hello_and_read_offer(self) -> Exchanges[None]:
        """Send the client's version and API key, and read the server's offer of device memory from the response.

        Raises:
            ApiError: the server refuses this client.
        """
        reply = yield LocalRequest(frames.HelloMessage(VERSION, self._api_key))
        raise_for_status(reply)
        self._device_offer.read_hello_document(reply.document)

    def exchange_call(self, call: ApiCall[Any]) -> Exchanges[ApiResponse]:
        """Send a call and return its response.  If the tensors do not fit into the shared memory, more is first
        requested from the server.

        Memory for gradients of a registered layer's parameters is first allocated for parameters that all heads
        share.  If the layer has separate parameters for each head, the server refuses that memory as too small,
        and the call is repeated with more.
        """
        response = yield from self._exchange_once(call)
        if response.status == MISFIT_STATUS and (of_heads := call.assume_per_head_parameters()) is not None:
            layer = yield LocalRequest(frames.GetLayerMessage(call.params["layer"]))
            if layer.status < 400 and isinstance(layer.document, dict) and layer.document.get("heads"):
                response = yield from self._exchange_once(of_heads)
        return response

    def _exchange_once(self, call: ApiCall[Any]) -> Exchanges[ApiResponse]:
        """Put a call's tensors into shared memory, send the call, and return its response.

        Device memory is used if x is a CUDA tensor on a device whose memory the server shares, otherwise host
        memory.
        """
        x = get_device_x(call)
        arena = None if x is None else (yield from self._get_or_make_device_arena(x.view_tensor.device.index))
        if arena is not None:
            there = yield from self._run_device_arena_steps(prepare_device_call(call, arena), arena)
            return make_device_response((yield LocalRequest(there.message, there)), arena, there.result_blocks)
        prepared = yield from self.run_host_arena_steps(prepare_host_call(call, self.arena))
        return make_arena_response((yield LocalRequest(prepared.message, prepared)), prepared.result_blocks)

    def allocate_memory(self, nbytes: int) -> Exchanges[memoryview]:
        """Allocate host memory shared with the server; it is freed after the last view of the returned buffer."""
        return (yield from self.run_host_arena_steps(allocate_host_block(self.arena, nbytes))).data[:nbytes]

    def try_allocate_device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...]) -> Exchanges[Any]:
        """Allocate a tensor in a device's shared memory; return None if the server shares no memory of that device.

        The server adds memory only if there is no space in the memory that is shared already.

        Args: index: torch's index of the device.
        """
        arena = yield from self._get_or_make_device_arena(index)
        if arena is None:
            return None
        needs = allocate_device_block(arena, prod(shape) * dtype.itemsize)
        return arena.make_tensor((yield from self._run_device_arena_steps(needs, arena)), dtype, shape)

    def run_host_arena_steps(self, needs: HostArenaSteps[_R]) -> Exchanges[_R]:
        """Run a generator that allocates shared host memory, and return its result.

        When the generator yields a number of bytes for which there is no space, request a segment from the
        server.
        """
        try:
            while True:
                yield from self._grow_host_arena(next(needs))
        except StopIteration as done:
            result: _R = done.value
            return result

    def _run_device_arena_steps(self, needs: DeviceArenaSteps[_R], arena: DeviceArena) -> Exchanges[_R]:
        """Run a generator that allocates shared device memory, and return its result.

        When the generator yields a number of bytes for which there is no space, request a segment from the
        server.  When it yields a stream, pass that on, for the connection to wait for the stream.
        """
        try:
            while True:
                lacking = next(needs)
                if isinstance(lacking, BusyStream):
                    yield lacking
                else:
                    yield from self._grow_device_arena(lacking, arena)
        except StopIteration as done:
            result: _R = done.value
            return result

    def _get_or_make_device_arena(self, index: int) -> Exchanges[DeviceArena | None]:
        """Return the shared memory of the CUDA device with this index; None if the server offers none.

        A server that was still starting at the first greeting is greeted again.  The device's call cache is
        added.
        """
        if not self._device_offer.is_known:
            yield from self.exchange_hello_and_read_offer()
        arena = self._device_offer.get_or_make_arena(index)
        if arena is not None:
            self.call_caches.add_device_cache(arena)
        return arena

    def _grow_host_arena(self, lacking: int) -> Exchanges[None]:
        """Add a segment of at least `lacking` bytes; if the server refuses, free unused segments and try again.

        If none is unused, the segments that there are get space from arrays that are garbage.

        Raises:
            ApiError: the server refuses, no segment is unused, and no array is garbage.
        """
        freed: Sequence[int] = ()
        while True:
            try:
                yield from self._request_segment(list_segment_sizes(lacking, self.arena.nbytes), "host", freed)
                return
            except OverloadedError:
                freed = self.arena.remove_idle_segments()
                if freed:
                    continue
                if self.arena.collect_garbage():
                    return
                raise

    def _grow_device_arena(self, lacking: int, arena: DeviceArena) -> Exchanges[None]:
        """Add a segment of at least `lacking` bytes to a device's memory; if the server refuses, take space from
        arrays that are garbage.

        Raises:
            ApiError: the server refuses, and no array is garbage.
        """
        try:
            yield from self._request_segment(list_device_segment_sizes(lacking, arena.nbytes), "device")
        except OverloadedError:
            if not arena.collect_garbage():
                raise

    def _request_segment(
        self, sizes: Sequence[int], memory: Literal["host", "device"], freed: Sequence[int] = ()
    ) -> Exchanges[None]:
        """Request a segment of the first size, and if the server refuses, of the second, smaller size.

        The segment is mapped when the response is received.

        Args: freed: numbers of segments that the server frees before.

        Raises:
            ApiError: the server refuses both.
        """
        reply = yield LocalRequest(frames.GrowArenaMessage(sizes[0], memory), freed_segments=freed)
        if reply.status >= 400 and sizes[1] < sizes[0]:
            reply = yield LocalRequest(frames.GrowArenaMessage(sizes[1], memory))
        raise_for_status(reply)

    def _map_segment(self, request: frames.GrowArenaMessage | None, reply: LazyLocalResponse) -> None:
        """If a response contains a new memory segment, map it, and add it to the host's or the device's arena.

        Args:
            request: the request for the segment, which states its size; None if the response is to another
                message.

        Raises:
            ValueError: a requested segment is missing or too small, or a segment was not requested.
        """
        if reply.segment is None:
            if request is not None and reply.status < 400:
                raise ValueError("the answer to a request for memory must bring a segment, it brings none")
            return
        if request is None or (request.memory == "device") != bool(reply.device):
            raise ValueError("a segment arrived that was not requested")
        if not self._reader.descriptors:
            raise ValueError("a segment arrived without its descriptor")
        descriptor = self._reader.descriptors.popleft()
        try:
            if not reply.device:
                self.arena.add_segment(reply.segment, map_segment(descriptor, request.nbytes))
            elif reply.nbytes < request.nbytes:
                raise ValueError(f"a segment must have at least {request.nbytes} bytes, it has {reply.nbytes}")
            else:
                self._device_offer.add_device_segment(reply.segment, descriptor, reply.nbytes)
        finally:
            os.close(descriptor)


def _encode_frees(numbers: Sequence[int]) -> bytes:
    return b"".join([frames.encode_frame(0, frames.FreeSegmentMessage(number)) for number in numbers])
