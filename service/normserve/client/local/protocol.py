"""A connection to a server on the same host, without its socket: its requests, responses and memory.

A thread, an event loop or a load test drives it.  Each sends what `begin` returns, gives `receive` what it
received, and carries out `Exchanges`; how it waits, and for how long, is its own.
"""

import itertools
import os
import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from normserve.client.answers.answer import Answer
from normserve.client.answers.reception import DOCUMENT_BYTES, LIST_BYTES
from normserve.client.calls.call import Call
from normserve.client.errors import ClientError, ConnectionFailedError, OverloadedError, UnexpectedAnswerError
from normserve.client.local.arena import Arena
from normserve.client.local.device import Busy, DeviceArena
from normserve.client.local.device_messages import (
    DeviceNeeds,
    growth_on_device,
    prepare_on_device,
    taken_on_device,
    understood_on_device,
    x_of,
)
from normserve.client.local.messages import (
    Needs,
    growth,
    in_current_span,
    prepare,
    refusal_of,
    required,
    taken,
    understood,
)
from normserve.client.local.offers import Offers
from normserve.client.local.recurring import KindsOfRecurring
from normserve.client.trace_context import TRACING
from normserve.codec import local_frames as frames
from normserve.codec.framing import FrameReader
from normserve.codec.local_frames import TAGS, VERSION, Message, Reply
from normserve.errors import NormserveError
from normserve.memory.host_tensors import DType
from normserve.memory.segments import map_segment

_R = TypeVar("_R")


class LocalRequest(msgspec.Struct):
    """A message whose response is wanted.

    Attributes:
        message: a `msgspec.Raw` is encoded already.
        used: kept until the response arrives, even if the caller no longer waits for it.
        meanwhile: called while the server works.
        freed: numbers of segments that are freed before.
    """

    message: Message | msgspec.Raw
    used: object = None
    meanwhile: Callable[[], None] | None = None
    freed: Sequence[int] = ()


Exchanges: TypeAlias = Generator[LocalRequest | Busy, Any, _R]
"""Yields a request, and is sent its `Reply`; or work of a device, and continues once it is complete."""


class PendingRequest(msgspec.Struct):
    """A request that was begun, until the response arrives.

    Attributes:
        used: as of `LocalRequest`.
        reply: the response; None until it arrives.
        wake: called on the receiving thread when the request is answered, or the connection fails.
    """

    tag: int
    used: object
    reply: Reply | None = None
    wake: Callable[[], None] | None = None


class ClientProtocol:
    """The arenas, the requests and the responses of one connection.

    Threads may share one if only one of them at a time calls `receive`.

    Attributes:
        arena: in the host's memory.
        recurring: calls that are made again.
        failure: makes the error with which the connection failed; None while it is usable.  Each caller gets an
            error of its own, because an error that was raised refers to the frames that it passed through.
    """

    def __init__(self, api_key: str | None) -> None:
        self.arena = Arena()
        self.recurring = KindsOfRecurring(self.arena)
        self.failure: Callable[[], ClientError] | None = None
        self._api_key = api_key
        self._offers = Offers()
        self._reader = FrameReader(DOCUMENT_BYTES)
        self._tags = itertools.count(1)
        self._pending: dict[int, PendingRequest] = {}
        # Those that bring a segment each, by their tags.
        self._growing: dict[int, frames.Grow] = {}

    @property
    def has_pending(self) -> bool:
        """Whether the server may still write to the arenas."""
        return bool(self._pending)

    def begin(self, request: LocalRequest) -> tuple[PendingRequest, bytes]:
        """Begin a request; return what is pending and the bytes to be sent."""
        message = request.message
        tag = next(self._tags) % (TAGS - 1) + 1
        frame = frames.write(tag, in_current_span(message) if TRACING in sys.modules else message)
        if request.freed:
            frame = _frees(request.freed) + frame
        if isinstance(message, frames.Grow):
            self._growing[tag] = message
        elif isinstance(message, frames.Layers):
            self._reader.max_bytes = LIST_BYTES
        pending = self._pending[tag] = PendingRequest(tag, request.used)
        return pending, frame

    def cancel(self, pending: PendingRequest) -> bytes:
        """Return the bytes to be sent when nobody waits for a request any more."""
        return frames.write(0, frames.Cancel(pending.tag))

    def receive(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> bool:
        """Take in what `recvmsg` returned; return whether a request was answered.

        If the server ended the connection, refused it or sent what it must not, the connection has failed.
        """
        is_answered = False
        reader = self._reader
        if ancillary:
            reader.max_descriptors = len(self._growing)
        try:
            for tag, content in reader.feed(data, ancillary, flags):
                reply = frames.read_reply(content)
                if self._growing or reply.segment is not None:
                    self._take_segment(self._growing.pop(tag, None), reply)
                pending = self._pending.pop(tag, None)
                if pending is not None:
                    pending.reply = reply
                    is_answered = True
                    if pending.wake is not None:
                        pending.wake()
                elif not tag and reply.status >= 400:
                    self.fail(partial(refusal_of, reply))
                    break
        except (NormserveError, ValueError) as error:
            self.fail(partial(UnexpectedAnswerError, f"the server sent a malformed answer: {error}"))
        finally:
            if reader.descriptors:
                reader.close_unclaimed()
        if not data:
            self.fail(partial(ConnectionFailedError, "the server closed the connection"))
        return is_answered

    def fail(self, failure: Callable[[], ClientError]) -> None:
        """End the connection with an error, unless it has failed; memory that clients can see stays as it is."""
        if self.failure is not None:
            return
        self.failure = failure
        for pending in list(self._pending.values()):
            if pending.wake is not None:
                pending.wake()

    def close(self) -> None:
        """Close the descriptors that came; the socket is closed."""
        self._reader.close()

    def drop_used(self) -> None:
        """Keep no memory for pending requests: their responses may never come."""
        # The server itself keeps the memory that it works in.
        for pending in list(self._pending.values()):
            pending.used = None

    def once_unused(self, leave: Callable[[], None]) -> None:
        """Call `leave` once no block of the arenas is in use; nothing may be taken from here on."""
        self._offers.once_empty(self.arena, leave)

    def leave(self) -> bytes:
        """Give up all segments, which are not in use; return the bytes to be sent."""
        return _frees([*self.arena.segments, *self._offers.given_up()])

    def greet(self) -> Exchanges[None]:
        """Introduce the client; learn what the server offers.

        Raises:
            ApiError: the server does not want this client.
        """
        reply = yield LocalRequest(frames.Hello(VERSION, self._api_key))
        required(reply)
        self._offers.read_greeting(reply.document)

    def exchange(self, call: Call[Any]) -> Exchanges[Answer]:
        """Make a call."""
        x = x_of(call)
        arena = None if x is None else (yield from self._device_arena(x.tensor.device.index))
        if arena is not None:
            there = yield from self._filled_on_device(prepare_on_device(call, arena), arena)
            return understood_on_device((yield LocalRequest(there.message, there)), arena, there.results)
        prepared = yield from self.filled(prepare(call, self.arena))
        return understood((yield LocalRequest(prepared.message, prepared)), prepared.results)

    def memory(self, nbytes: int) -> Exchanges[memoryview]:
        """Take bytes of the arena, which are the caller's until the last view of them is gone."""
        return (yield from self.filled(taken(self.arena, nbytes))).data[:nbytes]

    def device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...]) -> Exchanges[Any]:
        """Make a tensor in the arena in a device's memory; None where the server shares none of that device's.

        Args: index: the device's, as torch counts.
        """
        arena = yield from self._device_arena(index)
        if arena is None:
            return None
        needs = taken_on_device(arena, prod(shape) * dtype.itemsize)
        return arena.tensor((yield from self._filled_on_device(needs, arena)), dtype, shape)

    def filled(self, needs: Needs[_R]) -> Exchanges[_R]:
        """Let what needs memory of the host have it; return its result."""
        try:
            while True:
                yield from self._grow(next(needs))
        except StopIteration as done:
            result: _R = done.value
            return result

    def _filled_on_device(self, needs: DeviceNeeds[_R], arena: DeviceArena) -> Exchanges[_R]:
        """Let what needs memory of the device have it, and what it waits for be done; return its result."""
        try:
            while True:
                lacking = next(needs)
                if isinstance(lacking, Busy):
                    yield lacking
                else:
                    yield from self._grow_by(growth_on_device(lacking, arena.nbytes), "device")
        except StopIteration as done:
            result: _R = done.value
            return result

    def _device_arena(self, index: int) -> Exchanges[DeviceArena | None]:
        """Find the arena in the memory of a device, by torch's number."""
        if not self._offers.is_known:
            yield from self.greet()
        arena = self._offers.arena(index)
        if arena is not None:
            self.recurring.share_device(arena)
        return arena

    def _grow(self, lacking: int) -> Exchanges[None]:
        try:
            yield from self._grow_by(growth(lacking, self.arena.nbytes), "host")
        except OverloadedError:
            idle = self.arena.release_idle()
            if not idle:
                raise
            yield from self._grow_by(growth(lacking, self.arena.nbytes), "host", idle)

    def _grow_by(
        self, sizes: Sequence[int], memory: Literal["host", "device"], freed: Sequence[int] = ()
    ) -> Exchanges[None]:
        reply = yield LocalRequest(frames.Grow(sizes[0], memory), freed=freed)
        if reply.status >= 400 and sizes[1] < sizes[0]:
            reply = yield LocalRequest(frames.Grow(sizes[1], memory))
        required(reply)

    def _take_segment(self, request: frames.Grow | None, reply: Reply) -> None:
        """Map the segment that a response brings, if it brings one: as much of it as was requested, and no more."""
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
                self.arena.add(reply.segment, map_segment(descriptor, request.nbytes))
            elif reply.nbytes < request.nbytes:
                raise ValueError(f"a segment must have at least {request.nbytes} bytes, it has {reply.nbytes}")
            else:
                self._offers.add_device_segment(reply.segment, descriptor, reply.nbytes)
        finally:
            os.close(descriptor)


def _frees(numbers: Sequence[int]) -> bytes:
    return b"".join([frames.write(0, frames.Free(number)) for number in numbers])
