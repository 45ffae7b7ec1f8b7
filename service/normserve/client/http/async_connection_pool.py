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
    """A pool of connections to one address for tasks; a new event loop starts with an empty pool."""

    def __init__(self, address: ServerAddress, trust: TlsSettings, most: int, keep_s: float) -> None:
        """Args: as `connection_pool.ConnectionPool`."""
        self._address = address
        self._tls_settings = trust
        self._max_connections = most
        self._idle_timeout_s = keep_s
        self._closed = False
        self._process_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = IdleConnectionStack(most, keep_s)

    async def acquire(self, deadline: Deadline, *, fresh: bool = False) -> tuple[ClientHttpConnection, bool]:
        """Do as `connection_pool.ConnectionPool.acquire`; the caller must enforce the deadline on the wait."""
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
        """Return a connection to the pool."""
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
        if self._process_id == os.getpid():
            self._idle.close_all()
        self._process_id, self._loop = os.getpid(), loop
        self._free_slots = asyncio.Semaphore(self._max_connections)
        self._idle = IdleConnectionStack(self._max_connections, self._idle_timeout_s)

    async def _open(self, deadline: Deadline) -> ClientHttpConnection:
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
        if self._address.socket_path is not None:
            return [(socket.AF_UNIX, self._address.socket_path)]
        loop = asyncio.get_running_loop()
        return list_socket_addresses(
            await loop.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        )

    async def _open_at(self, place: Place, deadline: Deadline, *, is_last: bool) -> ClientHttpConnection:
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
    """Do as `connection_pool.run_steps`, without a deadline; the wait ends with the task's cancellation."""
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
    """A driver that resumes the steps from event loop callbacks, without waking the task in between."""

    def __init__(self, steps: Steps[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._loop.create_future()
        self._steps = steps
        self._descriptor = -1
        self._events = 0

    def wait_for(self, descriptor: int, events: int) -> None:
        """Register the next step to run when one of these events occurs."""
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
        """Remove the callbacks for all events."""
        if self._events & READ:
            self._loop.remove_reader(self._descriptor)
        if self._events & WRITE:
            self._loop.remove_writer(self._descriptor)
        self._events = 0

    def _run_step(self, ready_events: int) -> None:
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
