"""Calls of the asynchronous client."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from normserve.client.answers.answer import ApiResponse
from normserve.client.calls.call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.local.async_link import AsyncLocalClientConnection
from normserve.client.local.protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.local.recurring import CallCache, Signature
from normserve.memory.host_tensors import DType

_R = TypeVar("_R")


class AsyncLocalTransport:
    """An `AsyncTransport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connecting = asyncio.Lock()
        self._link: AsyncLocalClientConnection | None = None
        self._finalizer: weakref.finalize[..., AsyncLocalTransport] | None = None

    async def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """As `Transport.exchange`."""
        return await self._run(lambda protocol: protocol.exchange(call), deadline)

    def usable_link(self) -> AsyncLocalClientConnection | None:
        """As `LocalTransport.usable_link`."""
        link = self._link
        return link if link is not None and link.is_usable else None

    async def repeat(
        self, link: AsyncLocalClientConnection, recurring: CallCache, signature: Signature, deadline: Deadline
    ) -> Any:
        """As `LocalTransport.repeat`."""
        key, elsewhere = signature
        known = recurring.known.get(key)
        if known is None or not link.is_open:
            return None
        try:
            async with deadline.ends():
                if busy := recurring.busy():
                    await asyncio.to_thread(busy.wait)
                again = recurring.begin(known, elsewhere)
                if again is None:
                    return None
                if elsewhere and (busy := recurring.busy()):
                    await asyncio.to_thread(busy.wait)
                reply = await link.request(LocalRequest(again.content, again, again.make_results))
        except TimeoutError:
            raise deadline.error() from None
        return recurring.end(key, again, reply, self._api_key)

    async def memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """As `LocalTransport.memory`."""
        return await self._run(lambda protocol: protocol.memory(nbytes), deadline)

    async def device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline) -> Any:
        """As `LocalTransport.device_tensor`."""
        return await self._run(lambda protocol: protocol.device_tensor(index, dtype, shape), deadline)

    async def _run(self, exchanges: Callable[[LocalClientProtocol], Exchanges[_R]], deadline: Deadline) -> _R:
        try:
            async with deadline.ends():
                link = await self._connected()
                return await link.run(exchanges(link.protocol))
        except TimeoutError:
            raise deadline.error() from None

    async def close(self) -> None:
        """End the connection, once no view of a result is left."""
        self._forget()
        self._link = None

    async def _connected(self) -> AsyncLocalClientConnection:
        link = self._link
        if link is not None and link.is_usable:
            return link
        async with self._connecting:
            if self._link is None or not self._link.is_usable:
                link = AsyncLocalClientConnection(self._api_key)
                await link.connect(self._path)
                self._forget()
                self._link = link
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.retire)
            return self._link

    def _forget(self) -> None:
        """Release a connection that cannot be used here any more."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._link is not None:
            self._link.retire()
