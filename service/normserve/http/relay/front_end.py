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

from normserve.engine.busy_polling import BusyPoller, make_busy_poller
from normserve.errors import NormserveError, NotReadyError
from normserve.errors.problems import get_status
from normserve.http.middleware.middleware import choose_request_id
from normserve.http.problem_responses import make_problem_response
from normserve.http.relay import relay_messages
from normserve.http.relay.forwarded import ForwardedRequest, decline_message
from normserve.http.relay.relay_link import RelayLink
from normserve.http.transport import IncomingBody
from normserve.memory.host_segments import map_segment

# Interval between reports of the received bytes of slow bodies to the process that owns the device.
_PROGRESS_S = 0.02
# An owner that has sent no readiness message for this long gets no requests if another owner is ready.
_QUIET_S = 3.0


class RelayApplication:
    """Relays requests, in turn to each process that owns a device and accepts work.

    Attributes:
        on_link_lost: called when a link that was in use has ended, though its process may still run.
    """

    def __init__(self, index: int) -> None:
        """Args: index: this front end's index among all front ends."""
        self._index = index
        self.on_link_lost: Callable[[], None] = lambda: None
        self._owners: list[_OwnerSession] = []
        self._turn_counter = itertools.count()
        self._unreported_refusals: Counter[tuple[int, str]] = Counter()
        self._unreported_disconnects = 0
        self._connection_count = 0
        # No other thread of this process has work.
        self._busy_poller = make_busy_poller()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._choose_owner()
        if owner is None or not await owner.relay_request(scope, receive, send):
            await self._refuse_request(scope, send)

    @property
    def is_busy(self) -> bool:
        """Whether requests are in progress."""
        return any(owner.is_busy for owner in self._owners)

    def connect_owner(self, connected: socket.socket) -> None:
        """Begin to relay to a process that owns a device."""
        owner = _OwnerSession(connected, self._busy_poller)
        owner.on_lost = functools.partial(self._remove_owner, owner)
        owner.link.send_message(relay_messages.FrontEndHello(self._index, os.getpid()))
        owner.link.on_flushed = self._report_counts
        self._owners.append(owner)
        self._report_counts()

    def _remove_owner(self, owner: "_OwnerSession") -> None:
        self._owners.remove(owner)
        # From now on, the counts go to another owner.
        self._report_counts()
        # The owner ends a second link with the same process before it sends any message.
        if owner.has_sent_message:
            self.on_link_lost()

    def count_refusal(self, error: NormserveError) -> None:
        """Count an error response to input that was not relayed to the other process."""
        self._unreported_refusals[get_status(error), error.code] += 1
        self._report_counts()

    def count_late_disconnect(self) -> None:
        """Count a client that disconnected without reading its response."""
        self._unreported_disconnects += 1
        self._report_counts()

    def adjust_connection_count(self, change: int) -> None:
        """Add `change` to the number of open connections."""
        self._connection_count += change
        self._report_counts()

    async def _refuse_request(self, scope: Scope, send: Send) -> None:
        """Answer a request while there is no process to relay to.

        The response is the same for all requests, and needs no check of host or key.  The next owner counts it.
        """
        error = NotReadyError("the process that owns the device is starting again")
        self.count_refusal(error)
        request_id = choose_request_id(dict(scope["headers"]))
        status, headers, body = make_problem_response(error, request_id, scope["path"])
        headers.append((b"x-request-id", request_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _report_counts(self) -> None:
        """Send the counts to the first owner; if its link is backlogged, they are sent after the backlog."""
        if not self._owners or self._owners[0].link.is_backlogged:
            return
        owner = self._owners[0]
        if owner.reported_connections != self._connection_count:
            owner.reported_connections = self._connection_count
            owner.link.send_message(relay_messages.ConnectionCount(self._connection_count))
        for (status, code), count in self._unreported_refusals.items():
            owner.link.send_message(relay_messages.RefusalCount(status, code, count))
        self._unreported_refusals.clear()
        if self._unreported_disconnects:
            owner.link.send_message(relay_messages.LateDisconnectCount(self._unreported_disconnects))
        self._unreported_disconnects = 0

    def _choose_owner(self) -> "_OwnerSession | None":
        """Return the next of the owners that accept work; without any, one that refuses requests with a reason."""
        owners = self._owners
        if len(owners) > 1:
            owners = [each for each in owners if each.is_ready] or owners
        return owners[next(self._turn_counter) % len(owners)] if owners else None


class _OwnerSession:
    """The link to one process that owns a device, and the requests that are relayed to it.

    Attributes:
        on_lost: called when the link has ended.
        reported_connections: the number of connected clients that was last sent to the process.
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
        self.link = RelayLink(
            connected, relay_messages.from_owner, self._on_message, self._on_link_end, polling=polling
        )

    @property
    def has_sent_message(self) -> bool:
        """Whether the process has sent a message."""
        return self._last_message_at > 0

    @property
    def is_ready(self) -> bool:
        """Whether the process accepts work and has reported so recently."""
        return self._is_reported_ready and time.monotonic() - self._last_message_at < _QUIET_S

    async def relay_request(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Relay a request; return False if the other process ended before it began a response."""
        number = next(self._request_numbers)
        relayed = self._requests[number] = ForwardedRequest(self, number, scope, receive, send)
        try:
            return await relayed.relay()
        finally:
            del self._requests[number]

    @property
    def is_busy(self) -> bool:
        """Whether requests are in progress."""
        return bool(self._requests)

    def start_progress_reports(self, number: int, reception: IncomingBody) -> None:
        """Report the number of received bytes of a body regularly, if it is slow."""
        self.receiving_bodies[number] = reception
        if self._progress_timer is None:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _report_progress(self) -> None:
        self._progress_timer = None
        received = {number: each.received_bytes for number, each in self.receiving_bodies.items()}
        news = {number: nbytes for number, nbytes in received.items() if self._reported_bytes.get(number) != nbytes}
        self._reported_bytes = received
        if news:
            self.link.send_message(relay_messages.BodyProgress(news))
        if received:
            self._progress_timer = asyncio.get_running_loop().call_later(_PROGRESS_S, self._report_progress)

    def _on_message(self, message: Any) -> None:
        match message:
            case relay_messages.OwnerReadiness():
                self._is_reported_ready, self._last_message_at = message.is_ready, time.monotonic()
            case relay_messages.SharedSlabAdded():
                descriptor = self.link.pop_descriptor()
                try:
                    self.mapped_memory[message.number] = memoryview(map_segment(descriptor, is_there_at_once=False))
                except (ValueError, MemoryError):
                    # Requests with bytes in this slab could never be answered; without the link they end now.
                    self.link.close()
                finally:
                    os.close(descriptor)
            case relay_messages.SharedSlabRemoved():
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
