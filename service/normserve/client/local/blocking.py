"""Calls of the blocking client."""

import threading
import weakref
from typing import Any

from normserve.client.answers.answer import ApiResponse
from normserve.client.calls.call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.local.link import LocalClientConnection
from normserve.client.local.protocol import LocalRequest
from normserve.client.local.recurring import CallCache, Signature
from normserve.memory.host_tensors import DType


class LocalTransport:
    """A `Transport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connecting = threading.Lock()
        self._link: LocalClientConnection | None = None
        self._finalizer: weakref.finalize[..., LocalTransport] | None = None

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """As `Transport.exchange`."""
        link = self._connected(deadline)
        return link.run(link.protocol.exchange(call), deadline)

    def usable_link(self) -> LocalClientConnection | None:
        """The connection, if there is one that can be used."""
        link = self._link
        return None if link is None or not link.is_usable else link

    def repeat(
        self, link: LocalClientConnection, recurring: CallCache, signature: Signature, deadline: Deadline
    ) -> Any:
        """The result of a call that was answered before; None where that is not known.

        Args:
            link, recurring: that it was answered on, and is known to.
            signature: the call's.

        Raises:
            ClientError: there is no answer, or it is an error.
        """
        # No `Exchanges`, which would take a tenth of the client's time.
        key, elsewhere = signature
        known = recurring.known.get(key)
        if known is None or not link.is_open:
            return None
        if busy := recurring.busy():
            busy.wait()
        again = recurring.begin(known, elsewhere)
        if again is None:
            return None
        if elsewhere and (busy := recurring.busy()):
            busy.wait()
        reply = link.request(LocalRequest(again.content, again, again.make_results), deadline)
        return recurring.end(key, again, reply, self._api_key)

    def memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Bytes of the arena, which are the caller's until the last view of them is gone.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._connected(deadline)
        return link.run(link.protocol.memory(nbytes), deadline)

    def device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline) -> Any:
        """A tensor in the arena in a device's memory; None where the server shares none of that device's.

        Args: index: the device's, as torch counts.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._connected(deadline)
        return link.run(link.protocol.device_tensor(index, dtype, shape), deadline)

    def close(self) -> None:
        """End the connection, once no view of a result is left."""
        with self._connecting:
            link, self._link = self._link, None
            if link is not None:
                self._forget()
                link.retire()

    def _connected(self, deadline: Deadline) -> LocalClientConnection:
        link = self._link
        if link is not None and link.is_usable:
            return link
        deadline.acquire(self._connecting)
        try:
            if self._link is None or not self._link.is_usable:
                self._forget()
                self._link = link = LocalClientConnection(self._path, self._api_key, deadline)
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.retire)
            return self._link
        finally:
            self._connecting.release()

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
