"""The front end's ASGI application, which relays every request to a process that owns a device."""

import asyncio
import functools
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from normserve.engine.polling import BusyPoller, make_busy_poller
from normserve.errors import NormserveError, NotReadyError
from normserve.errors.problems import get_status
from normserve.http.edge.middleware import choose_request_id
from normserve.http.problems import make_problem_response
from normserve.http.relay import messages
from normserve.http.relay.forwarded import ForwardedRequest, decline_message
from normserve.http.relay.link import RelayLink
from normserve.http.transport import IncomingBody
from normserve.memory.segments import map_segment

# How often the process that owns the device learns how far bodies are that take their time.
_PROGRESS_S = 0.02
# Who has given no sign for so long gets no requests, where there is another.
_QUIET_S = 3.0


class RelayApplication:
    """Relays requests, in turn to each process that owns a device and takes work.

    Attributes:
        on_link_lost: told that a link has ended which was in use, though its process may still be there.
    """

    def __init__(self, index: int) -> None:
        """Args: index: of all front ends, this one's."""
        self._index = index
        self.on_link_lost: Callable[[], None] = lambda: None
        self._owners: list[_OwnerSession] = []
        self._turn_counter = itertools.count()
        self._unreported_refusals: Counter[tuple[int, str]] = Counter()
        self._unreported_disconnects = 0
        self._connection_count = 0
        # Nothing here is left to other threads.
        self._busy_poller = make_busy_poller()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._choose_owner()
        if owner is None or not await owner.relay_request(scope, receive, send):
            await self._refuse_request(scope, send)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return any(owner.is_busy for owner in self._owners)

    def connect_owner(self, connected: socket.socket) -> None:
        """A process that owns a device is there."""
        owner = _OwnerSession(connected, self._busy_poller)
        owner.on_lost = functools.partial(self._remove_owner, owner)
        owner.link.send_message(messages.FrontEndHello(self._index, os.getpid()))
        owner.link.on_flushed = self._report_counts
        self._owners.append(owner)
        self._report_counts()

    def _remove_owner(self, owner: "_OwnerSession") -> None:
        self._owners.remove(owner)
        # The next one in its place counts from now on.
        self._report_counts()
        # A second link with the same process is ended by that before it says anything.
        if owner.has_sent_message:
            self.on_link_lost()

    def count_refusal(self, error: NormserveError) -> None:
        """What never became a request for the other process was answered with an error."""
        self._unreported_refusals[get_status(error), error.code] += 1
        self._report_counts()

    def count_late_disconnect(self) -> None:
        """A client left with a response that it had not read."""
        self._unreported_disconnects += 1
        self._report_counts()

    def adjust_connection_count(self, change: int) -> None:
        """So many more are open than before."""
        self._connection_count += change
        self._report_counts()

    async def _refuse_request(self, scope: Scope, send: Send) -> None:
        """Answer a request while there is no process to relay to.

        The answer is the same for all, and needs no check of host or key.  The next process counts it.
        """
        error = NotReadyError("the process that owns the device is starting again")
        self.count_refusal(error)
        request_id = choose_request_id(dict(scope["headers"]))
        status, headers, body = make_problem_response(error, request_id, scope["path"])
        headers.append((b"x-request-id", request_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _report_counts(self) -> None:
        """Let the first owner know what it counts; one that is behind learns it at once later."""
        if not self._owners or self._owners[0].link.is_backlogged:
            return
        owner = self._owners[0]
        if owner.reported_connections != self._connection_count:
            owner.reported_connections = self._connection_count
            owner.link.send_message(messages.ConnectionCount(self._connection_count))
        for (status, code), count in self._unreported_refusals.items():
            owner.link.send_message(messages.RefusalCount(status, code, count))
        self._unreported_refusals.clear()
        if self._unreported_disconnects:
            owner.link.send_message(messages.LateDisconnectCount(self._unreported_disconnects))
        self._unreported_disconnects = 0

    def _choose_owner(self) -> "_OwnerSession | None":
        """The one whose turn it is of those that take work; else one that says why it does not."""
        owners = self._owners
        if len(owners) > 1:
            owners = [each for each in owners if each.is_ready] or owners
        return owners[next(self._turn_counter) % len(owners)] if owners else None


class _OwnerSession:
    """One process that owns a device.

    Attributes:
        on_lost: told that it is gone.
        reported_connections: how many clients it knows to be connected.
    """

    def __init__(self, connected: socket.socket, polling: BusyPoller | None) -> None:
        self.reported_connections = 0
        self._is_reported_ready = False
        self._last_message_at = 0.0
        self.on_lost: Callable[[], None] = lambda: None
        self.mapped_memory: dict[int, memoryview] = {}
        self.receiving_bodies: dict[int, IncomingBody] = {}
        self._requests: dict[int, ForwardedRequest] = {}
        self._request_numbers = itertools.count()
        self._progress_timer: asyncio.TimerHandle | None = None
        self._reported_bytes: dict[int, int] = {}
        self.link = RelayLink(connected, messages.from_owner, self._on_message, self._on_link_end, polling=polling)

    @property
    def has_sent_message(self) -> bool:
        """It has said something."""
        return self._last_message_at > 0

    @property
    def is_ready(self) -> bool:
        """It takes work, and has said so of late."""
        return self._is_reported_ready and time.monotonic() - self._last_message_at < _QUIET_S

    async def relay_request(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Relay a request; False where it must be answered here, since the other process is gone."""
        number = next(self._request_numbers)
        relayed = self._requests[number] = ForwardedRequest(self, number, scope, receive, send)
        try:
            return await relayed.relay()
        finally:
            del self._requests[number]

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._requests)

    def start_progress_reports(self, number: int, reception: IncomingBody) -> None:
        """Tell how far a body is, if it takes its time."""
        self.receiving_bodies[number] = reception
        if self._progress_timer is None:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _report_progress(self) -> None:
        self._progress_timer = None
        received = {number: each.received_bytes for number, each in self.receiving_bodies.items()}
        news = {number: nbytes for number, nbytes in received.items() if self._reported_bytes.get(number) != nbytes}
        self._reported_bytes = received
        if news:
            self.link.send_message(messages.BodyProgress(news))
        if received:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _on_message(self, message: Any) -> None:
        match message:
            case messages.OwnerReadiness():
                self._is_reported_ready, self._last_message_at = message.is_ready, time.monotonic()
            case messages.SharedSlabAdded():
                descriptor = self.link.pop_descriptor()
                try:
                    self.mapped_memory[message.number] = memoryview(map_segment(descriptor, is_there_at_once=False))
                except (ValueError, MemoryError):
                    # Requests whose bytes lie there could never be answered; without the link they end now.
                    self.link.close()
                finally:
                    os.close(descriptor)
            case messages.SharedSlabRemoved():
                for number in message.numbers:
                    self.mapped_memory.pop(number, None)
            case _:
                if (relayed := self._requests.get(message.number)) is not None:
                    relayed.on_message(message)
                else:
                    decline_message(self.link, message)

    def _on_link_end(self) -> None:
        self.on_lost()
        for relayed in self._requests.values():
            relayed.on_message(None)
