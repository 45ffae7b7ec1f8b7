"""Calls of the asynchronous client over shared memory."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.local.async_connection import AsyncLocalClientConnection
from normserve.client.local.call_cache import CallCache, Signature
from normserve.client.local.client_protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.responses.api_response import ApiResponse
from normserve.memory.tensors import DType

_R = TypeVar("_R")


class AsyncLocalTransport:
    """An `AsyncCallTransport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connect_lock = asyncio.Lock()
        self._connection: AsyncLocalClientConnection | None = None
        self._finalizer: weakref.finalize[..., AsyncLocalTransport] | None = None

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Do as `AsyncCallTransport.exchange`."""
        return await self._run_exchanges(lambda protocol: protocol.exchange_call(call), deadline)

    def get_usable_connection(self) -> AsyncLocalClientConnection | None:
        """Do as `LocalTransport.get_usable_connection`."""
        link = self._connection
        return link if link is not None and link.is_usable else None

    async def exchange_cached(
        self, link: AsyncLocalClientConnection, recurring: CallCache, signature: Signature, deadline: Deadline
    ) -> Any:
        """Do as `LocalTransport.exchange_cached`."""
        key, elsewhere = signature
        cached_call = recurring.calls.get(key)
        if cached_call is None or not link.is_open:
            return None
        try:
            async with deadline.make_asyncio_timeout():
                if busy := recurring.find_busy_stream():
                    await asyncio.to_thread(busy.wait_idle)
                pending_call = recurring.begin_call(cached_call, elsewhere)
                if pending_call is None:
                    return None
                if elsewhere and (busy := recurring.find_busy_stream()):
                    await asyncio.to_thread(busy.wait_idle)
                reply = await link.send_and_wait(
                    LocalRequest(pending_call.content, pending_call, pending_call.make_result_arrays)
                )
        except TimeoutError:
            raise deadline.make_error() from None
        return recurring.end_call(key, pending_call, reply, self._api_key)

    async def allocate_memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Do as `LocalTransport.allocate_memory`."""
        return await self._run_exchanges(lambda protocol: protocol.allocate_memory(nbytes), deadline)

    async def allocate_device_tensor(
        self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline
    ) -> Any:
        """Do as `LocalTransport.allocate_device_tensor`."""
        return await self._run_exchanges(
            lambda protocol: protocol.allocate_device_tensor(index, dtype, shape), deadline
        )

    async def _run_exchanges(
        self, exchanges: Callable[[LocalClientProtocol], Exchanges[_R]], deadline: Deadline
    ) -> _R:
        try:
            async with deadline.make_asyncio_timeout():
                link = await self._get_connection()
                return await link.run_exchanges(exchanges(link.protocol))
        except TimeoutError:
            raise deadline.make_error() from None

    async def close(self) -> None:
        """Close the connection once no view of a result is left."""
        self._retire_connection()
        self._connection = None

    async def _get_connection(self) -> AsyncLocalClientConnection:
        link = self._connection
        if link is not None and link.is_usable:
            return link
        async with self._connect_lock:
            if self._connection is None or not self._connection.is_usable:
                link = AsyncLocalClientConnection(self._api_key)
                await link.connect(self._path)
                self._retire_connection()
                self._connection = link
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.close_when_unused)
            return self._connection

    def _retire_connection(self) -> None:
        """Release a connection that cannot be used any more."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._connection is not None:
            self._connection.close_when_unused()
