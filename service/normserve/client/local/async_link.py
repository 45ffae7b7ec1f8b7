"""A connection of the asynchronous client, which its tasks share."""

import asyncio
import functools
import itertools
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from normserve.client.errors import ClientError, ConnectionFailedError, OverloadedError
from normserve.client.local.arena import Arena
from normserve.client.local.device import Busy, DeviceArena
from normserve.client.local.device_messages import (
    DeviceNeeds,
    growth_on_device,
)
from normserve.client.local.messages import Needs, growth, in_current_span, refusal_of, required
from normserve.client.local.offers import Offers
from normserve.client.local.recurring import KindsOfRecurring
from normserve.client.local.sockets import Incoming
from normserve.client.quoting import quoted
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import TAGS, VERSION, Message
from normserve.sockets import add_reader

_R = TypeVar("_R")


class AsyncLink:
    """One connection, its arena, and the tasks that wait for answers on it.

    Attributes:
        recurring: as of `link.Link`.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self.recurring = KindsOfRecurring(self.arena)
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._tags = itertools.count(1)
        # What a request uses, until it has its answer: the thread that waited for it may have given up.
        self._used: dict[int, tuple[asyncio.Future[frames.Reply], object]] = {}
        self._unsent = bytearray()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._incoming = Incoming(self._socket, self.arena)
        self._offers = Offers(self._incoming)
        self._api_key: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and of the event loop that runs."""
        return self.is_open and self._is_here()

    def _is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def device_arena(self, index: int) -> DeviceArena | None:
        """As `link.Link.device_arena`."""
        offers = self._offers
        if not offers.is_known:
            await self._greet()
        arena = offers.arena(index)
        if arena is not None:
            self.recurring.share_device(arena)
        return arena

    async def _greet(self) -> None:
        answer = await self.request(frames.Hello(VERSION, self._api_key))
        required(answer)
        self._offers.read_greeting(answer.document)

    async def connect(self, path: str, api_key: str | None) -> None:
        """Raises: ClientError: the server is not there, or does not want this client."""
        self._api_key = api_key
        try:
            await self._loop.sock_connect(self._socket, path)
        except OSError as error:
            self._socket.close()
            raise ConnectionFailedError(quoted(f"{path}: {error}", 200)) from error
        except BaseException:
            self._socket.close()
            raise
        add_reader(self._loop, self._socket, self._receive)
        try:
            await self._greet()
        except BaseException as error:
            self._fail(functools.partial(ConnectionFailedError, quoted(str(error), 200)))
            raise

    async def request(
        self,
        message: Message | msgspec.Raw,
        used: object = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> frames.Reply:
        """Send a message and wait for its answer.

        Args: as `link.Link.request`.

        Raises:
            ConnectionFailedError, UnexpectedAnswerError: the connection has ended, or is of no more use.
        """
        tag = next(self._tags) % (TAGS - 1) + 1
        answer: asyncio.Future[frames.Reply] = self._loop.create_future()
        self._used[tag] = (answer, used)
        self._incoming.expect(tag, message)
        self._send(frames.write(tag, in_current_span(message)))
        try:
            if meanwhile is not None:
                meanwhile()
            return await answer
        except BaseException:
            if self.is_open:
                self._send(frames.write(0, frames.Cancel(tag)))
            raise

    async def filled(self, needs: Needs[_R]) -> _R:
        """What needs memory, once it has it."""
        try:
            while True:
                await self._grow(next(needs))
        except StopIteration as done:
            result: _R = done.value
            return result

    async def filled_on_device(self, needs: DeviceNeeds[_R], arena: DeviceArena) -> _R:
        """What needs memory of the device, once it has it, and the device has done what it waits for."""
        try:
            while True:
                lacking = next(needs)
                if isinstance(lacking, Busy):
                    await asyncio.to_thread(lacking.wait)
                else:
                    await self._grow_by(growth_on_device(lacking, arena.nbytes), "device")
        except StopIteration as done:
            result: _R = done.value
            return result

    def retire(self) -> None:
        """Close, once nobody has a block of the arenas: neither a result nor a call that still waits."""
        if self.is_open:
            self._from_anywhere(self._let_go)
            self._offers.once_empty(self.arena, functools.partial(self._from_anywhere, self._leave))

    def _from_anywhere(self, work: Callable[[], None]) -> None:
        """A block may return on any thread, and its event loop may be over."""
        if self._loop.is_closed() or self._is_here():
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def _let_go(self) -> None:
        """Keep nothing for calls that gave up."""
        # Their answers may never come. The server itself keeps the memory that it works in.
        for tag, (answer, _) in self._used.items():
            self._used[tag] = answer, None

    async def _grow(self, lacking: int) -> None:
        try:
            await self._grow_by(growth(lacking, self.arena.nbytes), "host")
        except OverloadedError:
            idle = self.arena.release_idle()
            if not idle:
                raise
            for number in idle:
                self._send(frames.write(0, frames.Free(number)))
            await self._grow_by(growth(lacking, self.arena.nbytes), "host")

    async def _grow_by(self, sizes: Sequence[int], memory: Literal["host", "device"]) -> None:
        answer = await self.request(frames.Grow(sizes[0], memory))
        if answer.status >= 400 and sizes[1] < sizes[0]:
            answer = await self.request(frames.Grow(sizes[1], memory))
        required(answer)

    def _send(self, frame: bytes) -> None:
        if not self.is_open:
            raise ConnectionFailedError("the connection has ended")
        was_waiting = bool(self._unsent)
        self._unsent += frame
        if not was_waiting:
            self._flush()
            if self._unsent:
                self._loop.add_writer(self._socket, self._flush_rest)

    def _flush_rest(self) -> None:
        self._flush()
        if not self._unsent and self.is_open:
            self._loop.remove_writer(self._socket)

    def _flush(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The server may have said why it closed; the thread that receives reads that.
            self._unsent.clear()

    def _receive(self) -> None:
        try:
            found = self._incoming.receive()
        except BlockingIOError:
            return
        except ClientError as error:
            self._fail(functools.partial(type(error), str(error)))
            return
        except OSError as error:
            self._fail(functools.partial(ConnectionFailedError, quoted(str(error), 200)))
            return
        for tag, answer in found:
            if not tag and answer.status >= 400:
                self._fail(functools.partial(refusal_of, answer))
                return
            waiting = self._used.pop(tag, None)
            if waiting is not None and not waiting[0].done():
                waiting[0].set_result(answer)

    def _fail(self, failure: Callable[[], ClientError]) -> None:
        """The connection is of no more use; what clients see of its arena stays as it is."""
        if not self.is_open:
            return
        self._close()
        for answer, _ in self._used.values():
            if not answer.done():
                answer.set_exception(failure())
        self._used.clear()

    def _leave(self) -> None:
        """Give the arena back: no view of it is left."""
        if self.is_open:
            with suppress(OSError):
                for number in [*self.arena.segments, *self._offers.given_up()]:
                    self._socket.send(frames.write(0, frames.Free(number)))
            self._close()

    def _close(self) -> None:
        self.is_open = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._incoming.close()
        self._socket.close()
