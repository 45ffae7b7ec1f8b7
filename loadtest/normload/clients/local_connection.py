"""A connection of the load test to a server on the same host that shares memory with it.

It is driven by steps, like `Connection`.  A repeated request is the same message: its tensors stay in the arena
where they were first placed.
"""

import json
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from normserve.client.errors import ApiError
from normserve.client.http.socket_opening import connect
from normserve.client.http.socket_steps import READ, WRITE, Steps
from normserve.client.local.allocator import ArenaBlock
from normserve.client.local.call_messages import make_arena_response, prepare_host_call
from normserve.client.local.client_protocol import Exchanges, LocalClientProtocol, LocalRequest
from normserve.client.local.connection import RECEIVED_AT_ONCE
from normserve.client.responses.api_response import ApiResponse
from normserve.codec.framing import SendQueue
from normserve.codec.local_messages import LazyLocalResponse

from normload.clients.http_connection import SteppedConnection
from normload.clients.prepared_requests import PreparedRequest

_R = TypeVar("_R")

# Tensors and results of requests that a connection leaves in its arena, which the server counts against a quota.
_MAX_RETAINED_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _ArenaRequest:
    """A request whose tensors are in the memory shared with the server (the arena), ready to be sent again.

    Attributes:
        message: of the request, encoded.
        inputs: blocks of its tensors.
        results: blocks of its results.
    """

    message: msgspec.Raw
    inputs: list[ArenaBlock]
    results: dict[str, ArenaBlock]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (*self.inputs, *self.results.values()))


class LocalLoadConnection(SteppedConnection):
    """A connection over shared memory that opens at its first request, and again at the first request after an
    error.
    """

    def __init__(self, path: str, api_key: str | None, timeout_s: float) -> None:
        """Args:
        path: of the server's socket.
        api_key: sent to the server if it is not None.
        timeout_s: longest time of an exchange, from connecting to the response.
        """
        super().__init__(timeout_s)
        self._path = path
        self._api_key = api_key
        self._socket: _LocalSocket | None = None
        self._arena_requests: OrderedDict[int, _ArenaRequest] = OrderedDict()
        # The request of the last response, and the blocks of its results.
        self._last: tuple[int, dict[str, ArenaBlock]] | None = None

    def exchange_in_steps(self, request: PreparedRequest) -> Steps[ApiResponse]:
        """Return a generator that exchanges a request for its response, for a caller with its own event loop.

        Nothing is sent before its first step.  The response's results are valid until the next exchange.
        A refusal by the server becomes a response with its status.
        """
        if self._last is not None:
            # Only the figures of the earlier response are still read; its blocks are needed again.
            self._last[1].clear()
            self._last = None
        if self._socket is not None and not self._socket.has_no_input():
            self.close()
        try:
            if self._socket is None:
                self._socket = _LocalSocket(self._api_key)
                yield from self._socket.connect(self._path)
            placed = self._arena_requests.get(id(request))
            if placed is None:
                placed = yield from self._copy_to_arena(self._socket, request)
            response = yield from self._socket.send_request(LocalRequest(placed.message))
        except ApiError as refusal:
            self.close()
            return _make_refusal_response(refusal)
        except BaseException:
            self.close()
            raise
        results = dict(placed.results)
        self._last = id(request), results
        return make_arena_response(response, results)

    def detach_response(self) -> None:
        """Leave the memory of the last response's results to the caller, so that later exchanges do not
        overwrite it.
        """
        if self._last is not None:
            self._arena_requests.pop(self._last[0], None)
            self._last = None

    def close(self) -> None:
        """Close the connection, if it is open; the next exchange opens another."""
        self._arena_requests.clear()
        self._last = None
        if self._socket is not None:
            self._socket.close_when_unused()
            self._socket = None

    def _copy_to_arena(self, link: "_LocalSocket", request: PreparedRequest) -> Steps[_ArenaRequest]:
        """Copy a request's tensors into the shared memory, where they stay for its next exchange.

        The requests that were copied first are removed until all together have at most
        `_MAX_RETAINED_BYTES`.
        """
        assert request.call is not None
        retained_bytes = sum(placed.nbytes for placed in self._arena_requests.values())
        while (
            self._arena_requests
            and retained_bytes + request.nbytes + request.max_response_bytes > _MAX_RETAINED_BYTES
        ):
            retained_bytes -= self._arena_requests.popitem(last=False)[1].nbytes
        protocol = link.protocol
        prepared = yield from link.run_exchanges(
            protocol.run_host_arena_steps(prepare_host_call(request.call, protocol.arena))
        )
        message = msgspec.Raw(msgspec.json.encode(prepared.message))
        placed = _ArenaRequest(message, prepared.copied_inputs, dict(prepared.result_blocks))
        self._arena_requests[id(request)] = placed
        return placed


class _LocalSocket:
    """A socket of the shared-memory protocol, with the protocol's state and the frames that are not sent yet."""

    def __init__(self, api_key: str | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self.protocol = LocalClientProtocol(api_key)
        self._outgoing = SendQueue()

    def connect(self, path: str) -> Steps[None]:
        """Connect and exchange greetings."""
        yield from connect(self._socket, path)
        yield from self.run_exchanges(self.protocol.exchange_hello_and_read_offer())

    def has_no_input(self) -> bool:
        """Return whether the socket has nothing to read.  Between requests, it has something to read only if the
        connection has ended.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def run_exchanges(self, exchanges: Exchanges[_R]) -> Steps[_R]:
        """Run a generator that yields requests: send each one, and pass its response back.  Return the
        generator's result.

        Args: exchanges: a generator that uses host memory only, so that it yields no stream to wait for.

        Raises:
            ApiError: the server refuses the connection, or more memory.
            ClientError, OSError: the connection has ended, or cannot be used any more.
        """
        reply = None
        try:
            while True:
                step = exchanges.send(reply)
                assert isinstance(step, LocalRequest)
                reply = yield from self.send_request(step)
        except StopIteration as done:
            result: _R = done.value
            return result

    def send_request(self, request: LocalRequest) -> Steps[LazyLocalResponse]:
        """Send a request and wait for its response.

        Raises:
            ApiError: the server refuses the connection.
            ClientError, OSError: the connection has ended, or cannot be used any more.
        """
        protocol, outgoing = self.protocol, self._outgoing
        pending, frame = protocol.register_request(request)
        outgoing.add(frame)
        while outgoing:
            try:
                outgoing.send_all(self._socket)
            except BlockingIOError:
                yield self._socket.fileno(), WRITE
            except BrokenPipeError:
                # The server may have sent a reason before it closed.
                outgoing.discard_all()
        while pending.response is None:
            if protocol.make_failure is not None:
                raise protocol.make_failure()
            yield self._socket.fileno(), READ
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVED_AT_ONCE)
            except BlockingIOError:
                continue
            protocol.deliver_responses(data, ancillary, flags)
        return pending.response

    def close_when_unused(self) -> None:
        """Close the socket as soon as no tensor uses the connection's memory.  If a request is pending or the
        connection failed, close it at once.
        """
        self.protocol.close_descriptors()
        if self.protocol.has_pending or self.protocol.make_failure is not None:
            self._socket.close()
        else:
            self.protocol.call_when_unused(self._free_all_and_close)

    def _free_all_and_close(self) -> None:
        """Send the message that frees all of this connection's shared memory, and close the socket."""
        try:
            self._socket.send(self.protocol.encode_free_all())
        except OSError:
            return
        finally:
            self._socket.close()


def _make_refusal_response(refusal: ApiError) -> ApiResponse:
    """Make the response for a request that the server refused, from the error that the client raised."""
    headers = {"x-request-id": refusal.request_id}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = f"{refusal.retry_after_s:g}"
    return ApiResponse(refusal.status, headers, memoryview(json.dumps(refusal.problem).encode()))
