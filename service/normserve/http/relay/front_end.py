"""The end of a front end: an ASGI application that relays every request to a process that owns a device."""

import asyncio
import functools
import itertools
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from normserve.engine.progress import Progress
from normserve.errors import ClientLeftError, NormserveError, NotReadyError
from normserve.http.edge.middleware import Edge
from normserve.http.edge.origins import Origins
from normserve.http.relay import messages
from normserve.http.relay.link import Link
from normserve.http.transport import Reception
from normserve.http.transport.sending import Sending
from normserve.memory.segments import map_segment
from normserve.metrics.metrics import Metrics
from normserve.problems import status_of

# How often the process that owns the device learns how far bodies are that take their time.
_PROGRESS_S = 0.02
# Who has given no sign for so long gets no requests, where there is another.
_QUIET_S = 3.0
# The other process limits how long a body may take.
_NO_LIMIT_S = 7 * 86400.0


class FrontEnd:
    """Relays requests, in turn to each process that owns a device and takes work.

    Attributes:
        on_link_lost: told that a link has ended which was in use, though its process may still be there.
    """

    def __init__(self, index: int) -> None:
        """Args: index: of all front ends, this one's."""
        self._index = index
        self.on_link_lost: Callable[[], None] = lambda: None
        # While there is nobody to relay to there is one answer to all requests.  It needs no names of hosts and no
        # keys, and the other process counts it once that is there.
        self._alone = Edge(self._refuse, Metrics(), Progress(), Origins(None))
        self._owners: list[_Owner] = []
        self._turns = itertools.count()
        self._untold: Counter[tuple[int, str]] = Counter()
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._next()
        if owner is None or not await owner.relay(scope, receive, send):
            await self._alone(scope, receive, send)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return any(owner.is_busy for owner in self._owners)

    def connect(self, connected: socket.socket) -> None:
        """A process that owns a device is there."""
        owner = _Owner(connected)
        owner.on_gone = functools.partial(self._lose, owner)
        owner.link.send(messages.Hello(self._index, os.getpid()))
        self._owners.append(owner)
        if len(self._owners) == 1:
            owner.link.send(messages.Connections(self._connections))
            self._tell_refusals()

    def _lose(self, owner: "_Owner") -> None:
        self._owners.remove(owner)
        # A second link with the same process is ended by that before it says anything.
        if owner.was_heard:
            self.on_link_lost()

    def count_refusal(self, error: NormserveError) -> None:
        """What never became a request for the other process was answered with an error."""
        self._untold[status_of(error), error.code] += 1
        self._tell_refusals()

    def count_late_departure(self) -> None:
        """A client left with a response that it had not read."""
        if self._owners:
            self._owners[0].link.send(messages.LeftLate())

    def count_connections(self, change: int) -> None:
        """So many more are open than before."""
        self._connections += change
        if self._owners:
            self._owners[0].link.send(messages.Connections(self._connections))

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = NotReadyError("the process that owns the device is starting again")
        self.count_refusal(error)
        raise error

    def _tell_refusals(self) -> None:
        if self._owners:
            for (status, code), count in self._untold.items():
                self._owners[0].link.send(messages.Refused(status, code, count))
            self._untold.clear()

    def _next(self) -> "_Owner | None":
        """The one whose turn it is of those that take work; else one that says why it does not."""
        owners = self._owners
        if len(owners) > 1:
            owners = [each for each in owners if each.is_ready] or owners
        return owners[next(self._turns) % len(owners)] if owners else None


class _Owner:
    """One process that owns a device.

    Attributes:
        on_gone: told that it is gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._says_ready = False
        self._heard_at = 0.0
        self.on_gone: Callable[[], None] = lambda: None
        self.memory: dict[int, memoryview] = {}
        self.receiving: dict[int, Reception] = {}
        self._relayed: dict[int, _Relayed] = {}
        self._numbers = itertools.count()
        self._ticking: asyncio.TimerHandle | None = None
        self._told: dict[int, int] = {}
        self.link = Link(connected, messages.from_owner, self._on_message, self._on_end)

    @property
    def was_heard(self) -> bool:
        """It has said something."""
        return self._heard_at > 0

    @property
    def is_ready(self) -> bool:
        """It takes work, and has said so of late."""
        return self._says_ready and time.monotonic() - self._heard_at < _QUIET_S

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Relay a request; False where it must be answered here, since the other process is gone."""
        number = next(self._numbers)
        relayed = self._relayed[number] = _Relayed(self, number, scope, receive, send)
        try:
            return await relayed.run()
        finally:
            del self._relayed[number]

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._relayed)

    def watch(self, number: int, reception: Reception) -> None:
        """Tell how far a body is, if it takes its time."""
        self.receiving[number] = reception
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(_PROGRESS_S, self._tell_progress)

    def _tell_progress(self) -> None:
        self._ticking = None
        received = {number: each.received for number, each in self.receiving.items()}
        news = {number: nbytes for number, nbytes in received.items() if self._told.get(number) != nbytes}
        self._told = received
        if news:
            self.link.send(messages.Progress(news))
        if received:
            self._ticking = asyncio.get_running_loop().call_later(_PROGRESS_S, self._tell_progress)

    def _on_message(self, message: Any) -> None:
        match message:
            case messages.Readiness():
                self._says_ready, self._heard_at = message.is_ready, time.monotonic()
            case messages.Memory():
                descriptor = self.link.take_descriptor()
                try:
                    self.memory[message.number] = memoryview(map_segment(descriptor, is_there_at_once=False))
                except (ValueError, MemoryError):
                    # Requests whose bytes lie there could never be answered; without the link they end now.
                    self.link.close()
                finally:
                    os.close(descriptor)
            case messages.Forget():
                for number in message.numbers:
                    self.memory.pop(number, None)
            case _:
                if (relayed := self._relayed.get(message.number)) is not None:
                    relayed.on_message(message)

    def _on_end(self) -> None:
        self.on_gone()
        for relayed in self._relayed.values():
            relayed.on_message(None)


class _Relayed:
    """One request, from the side of its connection."""

    def __init__(self, owner: _Owner, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._owner = owner
        self._number = number
        self._scope = scope
        self._receive, self._send = receive, send
        self._reception: Reception = scope["state"]["reception"]
        self._sending: Sending = scope["state"]["sending"]
        # Whether the response has, and whether all of it is with the connection.
        self._has_begun = self._is_complete = False
        self._is_receiving = self._is_stopped = False
        self._pulling: asyncio.Future[Any] | None = None
        # What was said and has not been done; None says that nothing more will be.
        self._said: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    async def run(self) -> bool:
        """Relay it; False where it must be answered here, since the other process is gone."""
        link, sending = self._owner.link, self._sending
        sending.on_departure = self._tell_departure
        link.send(await self._request())
        try:
            while not self._is_complete and (message := await self._next()) is not None:
                await self._do(message)
        except asyncio.CancelledError:
            self._tell_departure()
            raise
        finally:
            sending.on_departure = None
        if not self._is_complete and self._has_begun:
            await sending.cut_off()
        return self._has_begun

    def on_message(self, message: Any) -> None:
        """What the other process says about it; None once that is gone."""
        if message is None or type(message) is messages.Stop:
            self._stop()
        if type(message) is not messages.Stop:
            self._said.append(message)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    async def _request(self) -> messages.Request:
        scope, reception = self._scope, self._reception
        head = messages.Head(
            method=scope["method"],
            path=scope["path"],
            raw_path=scope["raw_path"],
            query=scope["query_string"],
            headers=scope["headers"],
            http_version=scope["http_version"],
            scheme=scope["scheme"],
            server=scope["server"],
        )
        body = None
        if reception.is_complete and reception.announced:
            body = bytearray(await reception.into(_no_room, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S))
        return messages.Request(
            self._number, messages.encode(head), scope["client"], reception.announced, body, reception.began
        )

    async def _next(self) -> Any:
        if not self._said:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._said.popleft()

    async def _do(self, message: Any) -> None:
        match message:
            case messages.Respond():
                await self._respond(message)
            case messages.Send():
                await self._pass_on(message)
            case messages.Receive():
                await self._receive_into(message)
            case messages.Pull():
                await self._pull(all_of_it=message.all)
            case messages.Done():
                self._has_begun = self._is_complete = True
                await self._sending.cut_off()

    async def _respond(self, message: messages.Respond) -> None:
        self._has_begun = True
        memory = self._owner.memory
        body = [
            memory[each.memory][each.offset : each.offset + each.nbytes]
            if isinstance(each, messages.Part)
            else each
            for each in message.body
        ]
        await self._sending.respond(message.status, message.headers, body, message.nbytes)
        self._tell_sent(is_last=True)

    async def _pass_on(self, message: messages.Send) -> None:
        self._has_begun = True
        if message.status:
            start = {"type": "http.response.start", "status": message.status, "headers": message.headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": message.data, "more_body": message.more})
        self._tell_sent(is_last=not message.more)

    async def _receive_into(self, message: messages.Receive) -> None:
        room = self._owner.memory[message.memory][message.offset : message.offset + message.nbytes]
        reception, link = self._reception, self._owner.link
        was_complete = reception.is_complete
        self._is_receiving, self._is_stopped = True, False
        self._owner.watch(self._number, reception)
        try:
            body = await reception.into(lambda nbytes: room, pause_s=_NO_LIMIT_S, total_s=_NO_LIMIT_S)
        except NormserveError as error:
            left = isinstance(error, ClientLeftError) and not self._is_stopped
            link.send(messages.Ended(self._number, left))
            return
        except asyncio.CancelledError:
            link.send(messages.Ended(self._number, left=True))
            raise
        finally:
            self._is_receiving = False
            self._owner.receiving.pop(self._number, None)
        if was_complete:
            # It came meanwhile, to where it was not asked for yet.
            room[: len(body)] = body
        link.send(messages.Received(self._number, len(body), reception.began + reception.seconds))

    async def _pull(self, *, all_of_it: bool) -> None:
        self._is_stopped = False
        more = True
        while more and not self._is_stopped:
            self._pulling = asyncio.ensure_future(self._receive())
            try:
                message = await self._pulling
            except asyncio.CancelledError:
                if self._is_stopped:
                    return
                self._pulling.cancel()
                raise
            finally:
                self._pulling = None
            if message["type"] == "http.disconnect":
                self._owner.link.send(messages.Ended(self._number, left=True))
                return
            more = message.get("more_body", False)
            self._owner.link.send(messages.Piece(self._number, message.get("body", b""), more))
            await self._owner.link.drained()
            more = more and all_of_it

    def _stop(self) -> None:
        """No more of the body is wanted."""
        self._is_stopped = True
        if self._is_receiving:
            self._reception.fail(NotReadyError("no more of the body is wanted"))
        elif self._pulling is not None:
            self._pulling.cancel()

    def _tell_sent(self, *, is_last: bool) -> None:
        self._is_complete = is_last
        is_delivered = is_last and bool(self._sending.is_delivered)
        self._owner.link.send(messages.Sent(self._number, self._sending.seconds, is_delivered))

    def _tell_departure(self) -> None:
        self._owner.link.send(messages.Left(self._number))


def _no_room(nbytes: int) -> memoryview:
    raise AssertionError("a body that is there needs no memory")
