"""Calls of the blocking client over shared memory."""

import threading
import weakref
from typing import Any

from normserve.client.calls.api_call import ApiCall
from normserve.client.deadlines import Deadline
from normserve.client.local.call_cache import CallCache, Signature
from normserve.client.local.client_protocol import LocalRequest
from normserve.client.local.connection import LocalClientConnection
from normserve.client.responses.api_response import ApiResponse
from normserve.memory.tensors import DType


class LocalTransport:
    """A `CallTransport` that shares memory with a server on the same host."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self._path = path
        self._api_key = api_key
        self._connect_lock = threading.Lock()
        self._connection: LocalClientConnection | None = None
        self._finalizer: weakref.finalize[..., LocalTransport] | None = None

    def exchange(self, call: ApiCall[Any], deadline: Deadline) -> ApiResponse:
        """Do as `CallTransport.exchange`."""
        link = self._get_connection(deadline)
        return link.run_exchanges(link.protocol.exchange_call(call), deadline)

    def get_usable_connection(self) -> LocalClientConnection | None:
        """Return the connection if there is a usable one."""
        link = self._connection
        return None if link is None or not link.is_usable else link

    def exchange_cached(
        self, link: LocalClientConnection, recurring: CallCache, signature: Signature, deadline: Deadline
    ) -> Any:
        """Repeat a known call and return its result; None where the call must be built anew.

        Args:
            link, recurring: the connection, and its cache of calls.
            signature: the call's.

        Raises:
            ClientError: there is no response, or it is an error.
        """
        # No `Exchanges`, which would take a tenth of the client's time.
        key, elsewhere = signature
        cached_call = recurring.calls.get(key)
        if cached_call is None or not link.is_open:
            return None
        if busy := recurring.find_busy_stream():
            busy.wait_idle()
        pending_call = recurring.begin_call(cached_call, elsewhere)
        if pending_call is None:
            return None
        if elsewhere and (busy := recurring.find_busy_stream()):
            busy.wait_idle()
        reply = link.send_and_wait(
            LocalRequest(pending_call.content, pending_call, pending_call.make_result_arrays), deadline
        )
        return recurring.end_call(key, pending_call, reply, self._api_key)

    def allocate_memory(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Allocate bytes of the arena, which return with their last view.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._get_connection(deadline)
        return link.run_exchanges(link.protocol.allocate_memory(nbytes), deadline)

    def allocate_device_tensor(self, index: int, dtype: DType, shape: tuple[int, ...], deadline: Deadline) -> Any:
        """Allocate a tensor in the arena of a device; return None where the server shares no memory of that device.

        Args: index: the device's, as torch counts.

        Raises:
            ClientError: the server has no more, or is not there.
        """
        link = self._get_connection(deadline)
        return link.run_exchanges(link.protocol.allocate_device_tensor(index, dtype, shape), deadline)

    def close(self) -> None:
        """Close the connection once no view of a result is left."""
        with self._connect_lock:
            link, self._connection = self._connection, None
            if link is not None:
                self._detach_finalizer()
                link.close_when_unused()

    def _get_connection(self, deadline: Deadline) -> LocalClientConnection:
        link = self._connection
        if link is not None and link.is_usable:
            return link
        deadline.acquire_lock(self._connect_lock)
        try:
            if self._connection is None or not self._connection.is_usable:
                self._detach_finalizer()
                self._connection = link = LocalClientConnection(self._path, self._api_key, deadline)
                # Without a client there are no more requests, but views of results may be left.
                self._finalizer = weakref.finalize(self, link.close_when_unused)
            return self._connection
        finally:
            self._connect_lock.release()

    def _detach_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
