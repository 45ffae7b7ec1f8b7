"""A connection of the blocking client, which its threads share."""

import functools
import itertools
import math
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError, ConnectionFailedError, OverloadedError
from normserve.client.local.arena import Arena
from normserve.client.local.device import Busy, DeviceArena
from normserve.client.local.device_messages import DeviceNeeds, growth_on_device
from normserve.client.local.messages import Needs, growth, in_current_span, refusal_of, required
from normserve.client.local.offers import Offers
from normserve.client.local.recurring import KindsOfRecurring
from normserve.client.local.sockets import SHORTEST_WAIT_S, Incoming
from normserve.client.quoting import quoted
from normserve.client.trace_context import TRACING
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import TAGS, VERSION, Message

_R = TypeVar("_R")

# The number of this process, which costs a system call: it is another only after a fork.
_process = os.getpid()


def _after_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)

# How long a wait in the kernel lasts before the deadline is looked at again.
_WAIT_S = 1.0
_TIMEVAL = struct.Struct("ll")
# As an enumeration it takes a microsecond each time.
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Link:
    """One connection, its arena, and the threads that wait for answers on it.

    Of the threads that wait one receives, for all of them.

    Attributes:
        recurring: calls that are asked for again.
        is_open: nothing has failed, and it is not given back.
    """

    def __init__(self, path: str, api_key: str | None, deadline: Deadline) -> None:
        """Connect.

        Raises:
            ClientError: the server is not there, or does not want this client.
        """
        self.arena = Arena()
        self.recurring = KindsOfRecurring(self.arena)
        self.is_open = True
        self._process = _process
        self._tags = itertools.count(1)
        self._sending = threading.Lock()
        # Entered directly where no thread waits: a condition is Python code around it.
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._is_receiving = False
        self._waiting = 0
        # What a request uses, until it has its answer: the thread that waited for it may have given up.
        self._used: dict[int, object] = {}
        self._given_up: set[int] = set()
        self._answers: dict[int, frames.Reply] = {}
        # Makes a new error for each caller: an error that was raised holds the frames that it went through.
        self._failure: Callable[[], ClientError] | None = None
        self._wait_s = _WAIT_S
        self._socket = socket.socket(socket.AF_UNIX)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self._incoming = Incoming(self._socket, self.arena)
        self._offers = Offers(self._incoming)
        self._api_key = api_key
        try:
            self._set_wait(_WAIT_S)
            # A server that accepts nobody is waited for so long.
            wait_s = max(SHORTEST_WAIT_S, min(_WAIT_S, deadline.left_s() or _WAIT_S))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(wait_s))
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            deadline.check()
            raise ConnectionFailedError(quoted(f"{path}: {error}", 200)) from error
        try:
            self._greet(deadline)
        except BaseException:
            self._close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and this process's own: one that was forked has its parent's socket, and no other."""
        return self.is_open and self._process == _process

    def request(
        self,
        message: Message | msgspec.Raw,
        deadline: Deadline,
        used: object = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> frames.Reply:
        """Send a message and wait for its answer.

        Args:
            message: a `msgspec.Raw` is encoded already.
            used: kept until there is an answer, even if the caller no longer waits for it.
            meanwhile: called while the server works.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended, or is of no more use.
            RequestTimeoutError: there was no answer in time.
        """
        tag = next(self._tags) % (TAGS - 1) + 1
        self._incoming.expect(tag, message)
        self._used[tag] = used
        try:
            if TRACING in sys.modules:
                message = in_current_span(message)
            self._send(frames.write(tag, message), deadline)
            if meanwhile is not None:
                meanwhile()
            return self._wait_for(tag, deadline)
        except BaseException:
            if self.is_open:
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
        if arena is not None:
            self.recurring.share_device(arena)
        return arena

    def filled_on_device(self, needs: DeviceNeeds[_R], arena: DeviceArena, deadline: Deadline) -> _R:
        """What needs memory of the device, once it has it, and the device has done what it waits for."""
        try:
            while True:
                lacking = next(needs)
                if isinstance(lacking, Busy):
                    lacking.wait()
                else:
                    self._grow_by(growth_on_device(lacking, arena.nbytes), "device", deadline)
        except StopIteration as done:
            result: _R = done.value
            return result

    def retire(self) -> None:
        """Close, once nobody has a block of the arenas: neither a result nor a call that still waits."""
        # Answers to calls that gave up may never come. The server itself keeps the memory that it works in.
        for tag in list(self._used):
            self._used[tag] = None
        self._offers.once_empty(self.arena, self._leave)

    def _greet(self, deadline: Deadline) -> None:
        answer = self.request(frames.Hello(VERSION, self._api_key), deadline)
        required(answer)
        self._offers.read_greeting(answer.document)

    def _grow(self, lacking: int, deadline: Deadline) -> None:
        try:
            self._grow_by(growth(lacking, self.arena.nbytes), "host", deadline)
        except OverloadedError:
            idle = self.arena.release_idle()
            if not idle:
                raise
            for number in idle:
                self._send(frames.write(0, frames.Free(number)), deadline)
            self._grow_by(growth(lacking, self.arena.nbytes), "host", deadline)

    def _grow_by(self, sizes: Sequence[int], memory: Literal["host", "device"], deadline: Deadline) -> None:
        answer = self.request(frames.Grow(sizes[0], memory), deadline)
        if answer.status >= 400 and sizes[1] < sizes[0]:
            answer = self.request(frames.Grow(sizes[1], memory), deadline)
        required(answer)

    def _give_up(self, tag: int) -> None:
        """This answer is no longer wanted."""
        with self._lock:
            if tag in self._used:
                self._given_up.add(tag)
            self._answers.pop(tag, None)
        # Where another thread cannot send, nor can this one.
        if self._sending.acquire(blocking=False):
            with suppress(OSError):
                self._socket.send(frames.write(0, frames.Cancel(tag)), _AT_ONCE)
            self._sending.release()

    def _send(self, frame: bytes, deadline: Deadline) -> None:
        deadline.acquire(self._sending)
        try:
            rest: bytes | memoryview = frame
            while rest:
                try:
                    rest = rest[self._socket.send(rest, _AT_ONCE) :]
                except BlockingIOError:
                    if not self._wait_writable(deadline):
                        if len(rest) < len(frame):
                            self._fail(functools.partial(ConnectionFailedError, "a request was cut off"))
                        raise deadline.error() from None
                except OSError:
                    # The server may have said why it closed; the thread that receives reads that.
                    return
        finally:
            self._sending.release()

    def _wait_writable(self, deadline: Deadline) -> bool:
        """Wait until the server has read some of what it was sent; False where it does not in time."""
        left_s = deadline.left_s()
        if left_s is not None and left_s <= 0:
            return False
        wait_s = _WAIT_S if left_s is None else min(_WAIT_S, left_s)
        self._writable.poll(math.ceil(wait_s * 1000))
        return True

    def _wait_for(self, tag: int, deadline: Deadline) -> frames.Reply:
        lock, answers = self._lock, self._answers
        while True:
            with lock:
                while tag not in answers and self._is_receiving:
                    self._sleep(deadline)
                if tag in answers:
                    return answers.pop(tag)
                if self._failure is not None:
                    raise self._failure()
                self._is_receiving = True
            found: list[tuple[int, frames.Reply]] = []
            try:
                found = self._receive(deadline)
            finally:
                with lock:
                    self._is_receiving = False
                    for other, answer in found:
                        self._take_in(other, answer)
                    if self._waiting:
                        self._state.notify_all()
                    own = answers.pop(tag, None)
            if own is not None:
                return own

    def _sleep(self, deadline: Deadline) -> None:
        """Wait until the receiving thread has received something."""
        self._waiting += 1
        try:
            if not self._state.wait(deadline.left_s()):
                raise deadline.error()
        finally:
            self._waiting -= 1

    def _take_in(self, tag: int, answer: frames.Reply) -> None:
        if tag not in self._used:
            if not tag and answer.status >= 400:
                self._fail(functools.partial(refusal_of, answer))
            return
        del self._used[tag]
        if tag in self._given_up:
            self._given_up.discard(tag)
        else:
            self._answers[tag] = answer

    def _receive(self, deadline: Deadline) -> list[tuple[int, frames.Reply]]:
        """Answers, as soon as there are any."""
        incoming = self._incoming
        while True:
            if incoming.is_soon:
                deadline.check()
            else:
                self._limit_wait(deadline)
            try:
                if found := incoming.receive():
                    return found
            except BlockingIOError:
                continue
            except ClientError as error:
                raise self._fail(functools.partial(type(error), str(error))) from None
            except OSError as error:
                raise self._fail(functools.partial(ConnectionFailedError, quoted(str(error), 200))) from error
            except BaseException:
                # It is unknown whether anything came.
                self._fail(functools.partial(ConnectionFailedError, "an answer was lost to an interruption"))
                raise

    def _limit_wait(self, deadline: Deadline) -> None:
        """Let the next wait in the kernel end in time."""
        left_s = deadline.left_s()
        if left_s is not None and left_s <= 0:
            raise deadline.error()
        wait_s = _WAIT_S if left_s is None or left_s > _WAIT_S else left_s
        if wait_s != self._wait_s:
            self._set_wait(wait_s)

    def _set_wait(self, seconds: float) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(max(seconds, SHORTEST_WAIT_S)))
        self._wait_s = seconds

    def _fail(self, failure: Callable[[], ClientError]) -> ClientError:
        """The connection is of no more use; what clients see of its arena stays as it is."""
        self._failure = failure
        self.is_open = False
        self._close()
        return failure()

    def _close(self) -> None:
        self._incoming.close()
        self._socket.close()

    def _leave(self) -> None:
        """Give the arena back: no view of it is left."""
        if self.is_usable:
            self.is_open = False
            with suppress(OSError):
                for number in [*self.arena.segments, *self._offers.given_up()]:
                    self._socket.send(frames.write(0, frames.Free(number)), _AT_ONCE)
        self._close()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
