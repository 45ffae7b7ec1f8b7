"""Connection pool and socket waits for the tasks of an event loop."""

import asyncio
import os
import socket
from typing import Any, TypeVar

import httpx

from normserve.client.deadlines import Deadline
from normserve.client.http.connection import ClientHttpConnection
from normserve.client.http.idle_connections import IdleConnectionStack
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import (
    Place,
    TlsSettings,
    compute_attempt_s,
    connect,
    do_handshake,
    list_socket_addresses,
    make_socket,
    wrap_tls,
)
from normserve.client.http.socket_steps import READ, WRITE, Steps
from normserve.socket_readers import has_error

R = TypeVar("R")


class AsyncConnectionPool:
    """A pool of HTTP connections to one server, which tasks of an event loop share.

    The pool starts empty in another event loop and in a forked process, where earlier connections are
    unusable.
    """

    def __init__(self, address: ServerAddress, trust: TlsSettings, most: int, keep_s: float) -> None:
        """Make an empty pool.

        Args:
            address: of the server.
            trust: the TLS settings of the connections.
            most: connections in use at once; further callers wait.
            keep_s: seconds for which an idle connection is kept.
        """
        self._address = address
        self._tls_settings = trust
        self._max_connections = most
        self._idle_timeout_s = keep_s
        self._closed = False
        self._process_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = IdleConnectionStack(most, keep_s)

    async def acquire(self, deadline: Deadline, *, fresh: bool = False) -> tuple[ClientHttpConnection, bool]:
        """Return an idle connection, or open one if none is idle.  If the maximum number of connections is in use,
        this waits until one is released.

        The caller must `release` the connection in any case, and enforce the deadline on the entire wait.

        Args:
            deadline: limits each attempt to connect.
            fresh: always open a new connection.

        Returns:
            the connection, and whether it was used before.

        Raises:
            RuntimeError: the pool is closed.
            httpx.ConnectError, httpx.ConnectTimeout: the connection cannot be opened.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._process_id != os.getpid():
            self._reset(loop)
        free = self._free_slots
        await free.acquire()
        try:
            if self._closed:
                raise RuntimeError("the client is closed")
            if not fresh and (idle_connection := self._idle.pop()) is not None:
                return idle_connection, True
            return await self._open(deadline), False
        except BaseException:
            free.release()
            raise

    def release(self, connection: ClientHttpConnection) -> None:
        """End the use of a connection: keep it for later calls if it is reusable, otherwise close it."""
        if connection.is_reusable and not self._closed:
            self._idle.push(connection)
        else:
            connection.close()
        self._free_slots.release()

    def close(self) -> None:
        """Close all idle connections; a connection in use is closed when it is released."""
        self._closed = True
        self._idle.close_all()

    def _reset(self, loop: asyncio.AbstractEventLoop) -> None:
        """Empty the pool for use on this event loop, because connections and semaphores of another loop cannot be
        used.

        In a forked process, the idle connections belong to the parent and are not closed.
        """
        if self._process_id == os.getpid():
            self._idle.close_all()
        self._process_id, self._loop = os.getpid(), loop
        self._free_slots = asyncio.Semaphore(self._max_connections)
        self._idle = IdleConnectionStack(self._max_connections, self._idle_timeout_s)

    async def _open(self, deadline: Deadline) -> ClientHttpConnection:
        """Open a connection to the first of the server's addresses that accepts one.

        Raises:
            httpx.ConnectError, httpx.ConnectTimeout: no address accepts a connection.
        """
        try:
            found = await self._resolve_addresses()
            for place in found:
                try:
                    return await self._open_at(place, deadline, is_last=place == found[-1])
                except (OSError, httpx.ConnectTimeout) as error:
                    failure = error
            raise failure if found else OSError("the host has no address")
        # A UnicodeError is a name of which no query can be made: a part of it is too long.
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{self._address.display_name}: {error}") from error

    async def _resolve_addresses(self) -> list[Place]:
        """Return the addresses to try in turn: the path of the Unix socket, or those found for the host's name."""
        if self._address.socket_path is not None:
            return [(socket.AF_UNIX, self._address.socket_path)]
        loop = asyncio.get_running_loop()
        return list_socket_addresses(
            await loop.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        )

    async def _open_at(self, place: Place, deadline: Deadline, *, is_last: bool) -> ClientHttpConnection:
        """Connect to one address, and do the TLS handshake if the server's URL is https.

        Args: is_last: whether no other address is left, so that connecting may take all of the remaining time.

        Raises:
            OSError, httpx.ConnectTimeout: the connection cannot be made, or not in time.
        """
        family, where = place
        made = make_socket(family)
        try:
            async with asyncio.timeout(compute_attempt_s(deadline.get_remaining_s(), is_last=is_last)):
                await run_steps(connect(made, where))
            if self._address.is_tls:
                secured = wrap_tls(made, self._address, self._tls_settings.context)
                made = secured
                await run_steps(do_handshake(secured))
            return ClientHttpConnection(made)
        except TimeoutError:
            made.close()
            raise httpx.ConnectTimeout("there was no more time") from None
        except BaseException:
            made.close()
            raise


async def run_steps(steps: Steps[R]) -> R:
    """Run a generator that pauses where it must wait for a socket, and return its result.  The event loop waits for
    the socket.

    The generator yields a descriptor with the events to wait for, and is sent the events that occurred.
    There is no deadline; the wait ends with the task's cancellation.
    """
    try:
        descriptor, events = next(steps)
    except StopIteration as stop:
        at_once: R = stop.value
        return at_once
    driven = _StepRunner(steps)
    try:
        driven.wait_for(descriptor, events)
        outcome: R = await driven.outcome
        return outcome
    finally:
        driven.remove_callbacks()
        steps.close()


class _StepRunner:
    """An object that resumes a generator, in callbacks of the event loop, whenever the socket is ready.  The
    waiting task wakes only for the generator's result.
    """

    def __init__(self, steps: Steps[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._loop.create_future()
        self._steps = steps
        self._descriptor = -1
        self._events = 0

    def wait_for(self, descriptor: int, events: int) -> None:
        """Have the event loop run the next step when one of these events occurs on the descriptor.

        Args: events: `READ`, `WRITE` or both.
        """
        if self._events and has_error(descriptor):
            self.remove_callbacks()
        changed = events ^ self._events
        self._descriptor, self._events = descriptor, events
        if changed & READ:
            if events & READ:
                self._loop.add_reader(descriptor, self._run_step, READ)
            else:
                self._loop.remove_reader(descriptor)
        if changed & WRITE:
            if events & WRITE:
                self._loop.add_writer(descriptor, self._run_step, WRITE)
            else:
                self._loop.remove_writer(descriptor)

    def remove_callbacks(self) -> None:
        """Remove this runner's callbacks from the event loop, so that no further step runs."""
        if self._events & READ:
            self._loop.remove_reader(self._descriptor)
        if self._events & WRITE:
            self._loop.remove_writer(self._descriptor)
        self._events = 0

    def _run_step(self, ready_events: int) -> None:
        """Resume the generator with the events that occurred; set `outcome` if the generator has ended."""
        # Both events of one turn of the loop call this, and the first may have been the last one.
        if self.outcome.done():
            return
        try:
            descriptor, events = self._steps.send(ready_events)
        except StopIteration as stop:
            self.remove_callbacks()
            self.outcome.set_result(stop.value)
        except Exception as error:
            self.remove_callbacks()
            self.outcome.set_exception(error)
        else:
            self.wait_for(descriptor, events)
