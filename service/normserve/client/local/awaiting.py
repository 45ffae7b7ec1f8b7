"""Calls of the asynchronous client."""

import asyncio
import weakref
from math import prod
from typing import Any

from normserve.client.answers.answer import Answer
from normserve.client.calls.call import Call
from normserve.client.deadlines import Deadline
from normserve.client.local.async_link import AsyncLink
from normserve.client.local.device_messages import (
    prepare_on_device,
    taken_on_device,
    understood_on_device,
    x_of,
)
from normserve.client.local.messages import prepare, taken, understood
from normserve.client.local.recurring import Recurring, Signature
from normserve.memory.host_tensors import DType


class AsyncLocalTransport:
    """An `AsyncTransport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connecting = asyncio.Lock()
        self._link: AsyncLink | None = None
        self._finalizer: weakref.finalize[..., AsyncLocalTransport] | None = None

    async def exchange(self, call: Call[Any], deadline: Deadline) -> Answer:
        """As `Transport.exchange`."""
        try:
            async with deadline.ends():
                link = await self._connected()
                x = x_of(call)
                arena = None if x is None else await link.device_arena(x.tensor.device.index)
                if arena is not None:
                    there = await link.filled_on_device(prepare_on_device(call, arena), arena)
                    return understood_on_device(await link.request(there.message, there), arena, there.results)
                prepared = await link.filled(prepare(call, link.arena))
                return understood(await link.request(prepared.message, prepared), prepared.results)
        except TimeoutError:
            raise deadline.error() from None

    def usable_link(self) -> AsyncLink | None:
        """As `LocalTransport.usable_link`."""
        link = self._link
        return link if link is not None and link.is_usable else None

    async def repeat(self, link: AsyncLink, recurring: Recurring, signature: Signature, deadline: Deadline) -> Any:
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
                told = await link.request(again.content, again, again.make_results)
        except TimeoutError:
            raise deadline.error() from None
        return recurring.end(key, again, told, self._api_key)

    async def memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """As `LocalTransport.memory`."""
        try:
            async with deadline.ends():
                link = await self._connected()
                block = await link.filled(taken(link.arena, nbytes))
                return block.data[:nbytes]
        except TimeoutError:
            raise deadline.error() from None

    async def device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline) -> Any:
        """As `LocalTransport.device_tensor`."""
        try:
            async with deadline.ends():
                link = await self._connected()
                arena = await link.device_arena(index)
                if arena is None:
                    return None
                nbytes = prod(shape) * dtype.itemsize
                return arena.tensor(
                    await link.filled_on_device(taken_on_device(arena, nbytes), arena), dtype, shape
                )
        except TimeoutError:
            raise deadline.error() from None

    async def close(self) -> None:
        """End the connection, once no view of a result is left."""
        self._forget()
        self._link = None

    async def _connected(self) -> AsyncLink:
        link = self._link
        if link is not None and link.is_usable:
            return link
        async with self._connecting:
            if self._link is None or not self._link.is_usable:
                link = AsyncLink()
                await link.connect(self._path, self._api_key)
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
