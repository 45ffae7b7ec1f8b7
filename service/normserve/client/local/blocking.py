"""Calls of the blocking client."""

import functools
import itertools
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Literal, TypeVar

import msgspec

from normserve.client.answers.answer import Answer
from normserve.client.calls.call import Call
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError, ConnectionFailedError
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
from normserve.client.local.messages import Needs, growth, prepare, refusal_of, required, taken, understood
from normserve.client.local.offers import Offers
from normserve.client.local.own_memory import Offer
from normserve.client.local.recurring import Recurring
from normserve.client.local.sockets import SHORTEST_WAIT_S, Incoming
from normserve.client.quoting import quoted
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import TAGS, VERSION, Message
from normserve.memory.host_tensors import DType

_R = TypeVar("_R")

# How long a wait in the kernel lasts before the deadline is looked at again.
_WAIT_S = 1.0
_TIMEVAL = struct.Struct("ll")


class LocalTransport:
    """A `Transport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._finalizer: weakref.finalize[..., LocalTransport] | None = None

    def exchange(self, call: Call[Any], deadline: Deadline) -> Answer:
        """As `Transport.exchange`."""
        link = self._connected(deadline)
        x = x_of(call)
        arena = None if x is None else link.device_arena(x.tensor.device.index, deadline)
        if arena is not None:
            there = link.filled_on_device(prepare_on_device(call, arena), arena, deadline)
            return understood_on_device(link.ask(there.message, deadline, there), arena, there.results)
        prepared = link.filled(prepare(call, link.arena), deadline)
        return understood(link.ask(prepared.message, deadline, prepared), prepared.results)

    def recurring(self) -> Recurring | None:
        """What is known of calls on the device's memory; None before there was one, or over this connection."""
        link = self._link
        return link.recurring if link is not None and link.is_usable else None

    def ask_again(self, recurring: Recurring, key: Hashable, deadline: Deadline) -> Any:
        """The result of a call that was answered before; None where that is not known."""
        link = self._link
        return None if link is None or link.recurring is not recurring else recurring.ask(key, link, deadline)

    def memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Bytes of the arena, which are the caller's until the last view of them is gone.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._connected(deadline)
        return link.filled(taken(link.arena, nbytes), deadline).data[:nbytes]

    def device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline) -> Any:
        """A tensor in the arena in a device's memory; None where the server shares none of that device's.

        Args: index: the device's, as torch counts.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._connected(deadline)
        arena = link.device_arena(index, deadline)
        if arena is None:
            return None
        nbytes = prod(shape) * dtype.itemsize
        return arena.tensor(link.filled_on_device(taken_on_device(arena, nbytes), arena, deadline), dtype, shape)

    def close(self) -> None:
        """End the connection, once nobody looks at a result any more."""
        with self._connecting:
            link, self._link = self._link, None
            if link is not None:
                self._forget()
                link.retire()

    def _connected(self, deadline: Deadline) -> "Link":
        link = self._link
        if link is not None and link.is_usable:
            return link
        with self._connecting:
            if self._link is None or not self._link.is_usable:
                self._forget()
                self._link = link = Link(self._path, self._api_key, deadline)
                # Without a client nobody asks any more, but somebody may still look at results.
                self._finalizer = weakref.finalize(self, link.retire)
            return self._link

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()


class Link:
    """One connection, its arena, and the threads that wait for answers on it.

    Of the threads that wait one receives, for all of them.

    Attributes:
        recurring: calls on the device's memory; None until there was one.
    """

    def __init__(self, path: str, api_key: str | None, deadline: Deadline) -> None:
        """Connect.

        Raises:
            ClientError: the server is not there, or does not want this client.
        """
        self.arena = Arena()
        self.recurring: Recurring | None = None
        self._is_open = True
        self._pid = os.getpid()
        self._tags = itertools.count(1)
        self._sending = threading.Lock()
        self._state = threading.Condition(threading.Lock())
        self._is_receiving = False
        # What a request uses, until it has its answer: whoever waited for that may have given up.
        self._used: dict[int, object] = {}
        self._given_up: set[int] = set()
        self._answers: dict[int, frames.Answer] = {}
        # Makes a new error for each that hears of it: what is raised holds the frames that it went through.
        self._failure: Callable[[], ClientError] | None = None
        self._wait_s = _WAIT_S
        self._socket = socket.socket(socket.AF_UNIX)
        self._incoming = Incoming(self._socket, self.arena)
        self._offers = Offers(self._incoming)
        self._api_key = api_key
        try:
            self._set_wait(_WAIT_S)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_WAIT_S))
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConnectionFailedError(quoted(str(error), 200)) from error
        try:
            self._greet(deadline)
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and this process's own: one that was forked has its parent's socket, and no other."""
        return self._is_open and self._pid == os.getpid()

    def ask(
        self,
        message: Message | msgspec.Raw,
        deadline: Deadline,
        used: object = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> frames.Answer:
        """Send a message and wait for its answer.

        Args:
            message: a `msgspec.Raw` is encoded already.
            used: kept until there is an answer, also if nobody waits for it any more.
            meanwhile: called while the server is at it.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended, or is of no more use.
            RequestTimeoutError: there was no answer in time.
        """
        tag = next(self._tags) % (TAGS - 1) + 1
        if self._offers.has_withdrawals:
            for number in self._offers.withdrawn():
                self._send(frames.write(0, frames.Free(number)), deadline)
        self._used[tag] = used
        try:
            self._send(frames.write(tag, message), deadline)
            if meanwhile is not None:
                self._do(meanwhile, tag)
            return self._wait_for(tag, deadline)
        except TimeoutError:
            self._give_up(tag)
            raise

    def filled(self, needs: Needs[_R], deadline: Deadline) -> _R:
        """What needs memory, once it has it."""
        try:
            while True:
                self._grow(next(needs), deadline)
        except StopIteration as done:
            result: _R = done.value
            return result

    def device_arena(self, index: int, deadline: Deadline) -> DeviceArena | None:
        """That in the memory of a device, by torch's number; None where the server shares none of that device's."""
        offers = self._offers
        if not offers.is_known:
            self._greet(deadline)
        arena = offers.arena(index)
        if arena is not None and self.recurring is None:
            self.recurring = Recurring(arena)
        return arena

    def filled_on_device(self, needs: DeviceNeeds[_R], arena: DeviceArena, deadline: Deadline) -> _R:
        """What needs memory of the device, once it has it, and the device has done what it waits for."""
        try:
            while True:
                lacking = next(needs)
                if isinstance(lacking, Busy):
                    lacking.wait()
                elif isinstance(lacking, Offer):
                    lacking.hear(self.ask(lacking.message, deadline))
                else:
                    self._grow_by(growth_on_device(lacking, arena.nbytes), "device", deadline)
        except StopIteration as done:
            result: _R = done.value
            return result

    def retire(self) -> None:
        """Close, once nobody has a block of the arenas."""
        if self.is_usable:
            with suppress(OSError):
                for number in self._offers.withdraw_all():
                    self._socket.send(frames.write(0, frames.Free(number)), socket.MSG_DONTWAIT)
        self._offers.once_empty(self.arena, self._leave)

    def _greet(self, deadline: Deadline) -> None:
        answer = self.ask(frames.Hello(VERSION, self._api_key), deadline)
        required(answer)
        self._offers.hear(answer.document)

    def _grow(self, lacking: int, deadline: Deadline) -> None:
        self._grow_by(growth(lacking, self.arena.nbytes), "host", deadline)

    def _grow_by(self, sizes: Sequence[int], memory: Literal["host", "device"], deadline: Deadline) -> None:
        answer = self.ask(frames.Grow(sizes[0], memory), deadline)
        if answer.status >= 400 and sizes[1] < sizes[0]:
            answer = self.ask(frames.Grow(sizes[1], memory), deadline)
        required(answer)

    def _do(self, meanwhile: Callable[[], None], tag: int) -> None:
        """Call it; if that goes wrong nobody waits for the answer."""
        try:
            meanwhile()
        except BaseException:
            self._give_up(tag)
            raise

    def _give_up(self, tag: int) -> None:
        """Nobody waits for this answer any more."""
        with self._state:
            if tag in self._used:
                self._given_up.add(tag)
            self._answers.pop(tag, None)
        with suppress(OSError), self._sending:
            self._socket.send(frames.write(0, frames.Cancel(tag)), socket.MSG_DONTWAIT)

    def _send(self, frame: bytes, deadline: Deadline) -> None:
        with self._sending:
            rest = memoryview(frame)
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    deadline.check()
                except OSError:
                    # The server may have said why it closed; whoever receives will hear.
                    return

    def _wait_for(self, tag: int, deadline: Deadline) -> frames.Answer:
        state = self._state
        while True:
            with state:
                while tag not in self._answers and self._is_receiving:
                    if not state.wait(deadline.left_s()):
                        raise deadline.error()
                if tag in self._answers:
                    return self._answers.pop(tag)
                if self._failure is not None:
                    raise self._failure()
                self._is_receiving = True
            found: list[tuple[int, frames.Answer]] = []
            try:
                found = self._receive(deadline)
            finally:
                with state:
                    self._is_receiving = False
                    for other, answer in found:
                        self._take_in(other, answer)
                    state.notify_all()

    def _take_in(self, tag: int, answer: frames.Answer) -> None:
        if tag not in self._used:
            if not tag and answer.status >= 400:
                self._fail(functools.partial(refusal_of, answer))
            return
        del self._used[tag]
        if tag in self._given_up:
            self._given_up.discard(tag)
        else:
            self._answers[tag] = answer

    def _receive(self, deadline: Deadline) -> list[tuple[int, frames.Answer]]:
        """Answers, as soon as there are any."""
        while True:
            left_s = deadline.left_s()
            if left_s is not None and left_s <= 0:
                raise deadline.error()
            wait_s = _WAIT_S if left_s is None else min(left_s, _WAIT_S)
            if wait_s != self._wait_s:
                self._set_wait(wait_s)
            try:
                if found := self._incoming.receive():
                    return found
            except BlockingIOError:
                continue
            except ClientError as error:
                raise self._fail(functools.partial(type(error), str(error))) from None
            except OSError as error:
                raise self._fail(functools.partial(ConnectionFailedError, quoted(str(error), 200))) from error
            except BaseException:
                # Whether anything came nobody knows any more.
                self._fail(functools.partial(ConnectionFailedError, "an answer was lost to an interruption"))
                raise

    def _set_wait(self, seconds: float) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(max(seconds, SHORTEST_WAIT_S)))
        self._wait_s = seconds

    def _fail(self, failure: Callable[[], ClientError]) -> ClientError:
        """The connection is of no more use; what clients see of its arena stays as it is."""
        self._failure = failure
        self._is_open = False
        self._incoming.close()
        self._socket.close()
        return failure()

    def _leave(self) -> None:
        """Give the arena back: nobody looks at it."""
        if not self.is_usable:
            self._socket.close()
            return
        self._is_open = False
        with suppress(OSError):
            for number in [*self.arena.segments, *self._offers.given_up()]:
                self._socket.send(frames.write(0, frames.Free(number)), socket.MSG_DONTWAIT)
        self._socket.close()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
