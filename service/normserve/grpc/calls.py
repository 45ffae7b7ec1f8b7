"""The life of a call: its key, room for its message, the message, the response or the error's status."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from normserve.codec.forwarded_for import TrustedProxies
from normserve.grpc.admission_check import AdmissionCheck
from normserve.grpc.caller import Header, identify_caller, make_forwarded_headers
from normserve.grpc.message_budget import MessageBudget, MessageReservation
from normserve.grpc.peer_connections import ConnectionCloser
from normserve.grpc.statuses import CallError, Code, make_trailer
from normserve.logs.formatting import ThrottledLogger

log = logging.getLogger(__name__)

# Anybody may open a call that needs no key, and so take the room of others.
_KEY_FREE_RECEIVE_S = 1.0
_RETRY_AFTER_S = 1.0

# Of a message that has no tensors.
_MAX_SMALL_BYTES = 2**20

#: Responds to one message of a caller with these headers; may resize the message's reservation.
Responder = Callable[[bytes, list[Header], MessageReservation], Awaitable[bytes]]


class StreamDrain:
    """The end of streams when the gateway drains: at once for one that waits, else after its response."""

    def __init__(self) -> None:
        self._has_begun = False
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End the streams that wait for a message."""
        self._has_begun = True
        for each in self._waits:
            each.reschedule(asyncio.get_running_loop().time())

    async def receive_message(
        self, context: aio.ServicerContext[bytes, bytes], patience_s: float | None
    ) -> bytes | None:
        """Receive the next message of a stream; return None after the last one.

        Args: patience_s: for how long to wait; None for however long that takes.

        Raises:
            CallError: there was no message for too long, or the gateway drains.
        """
        if not self._has_begun:
            wait = asyncio.timeout(patience_s)
            try:
                async with wait:
                    self._waits.add(wait)
                    message: Any = await context.read()
                    return None if message is aio.EOF else message
            except TimeoutError:
                pass
            finally:
                self._waits.discard(wait)
        if not self._has_begun:
            raise _make_late_error(patience_s)
        raise CallError(Code.UNAVAILABLE, "the server is shutting down", _RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class CallRunner:
    """The order in which every call is admitted, received and responded to.

    All methods are of the kind with streams both ways, whose handlers have a call's metadata before its message;
    for a client, a method with one message and one response is the same.

    Attributes:
        budget: for the messages of calls.
        probe_budget: for those of probes, which must be answered when there is no room for others.
        stream_drain: ends the streams when the gateway drains.
        receive_s: time for the message of a call.
        send_s: time for a client to read a response.
        proxies: those that name their clients; None if there are none.
        connection_closer: ends the connections of clients that do not read.
    """

    admission_check: AdmissionCheck
    budget: MessageBudget
    probe_budget: MessageBudget
    stream_drain: StreamDrain
    receive_s: float
    send_s: float
    failures: ThrottledLogger
    proxies: TrustedProxies | None = None
    connection_closer: ConnectionCloser = field(default_factory=ConnectionCloser)

    def make_handler(
        self, respond: Responder, *, is_probe: bool = False, has_tensors: bool = False
    ) -> grpc.RpcMethodHandler:
        """Make the handler of a method with one message and one response.

        Args:
            is_probe: whether the method needs no key.
            has_tensors: whether its messages may be long.
        """
        budget = self.probe_budget if is_probe else self.budget
        max_bytes = budget.max_message_bytes if has_tensors else _MAX_SMALL_BYTES
        patience_s = _KEY_FREE_RECEIVE_S if is_probe else self.receive_s

        async def handle(messages: Any, context: aio.ServicerContext[bytes, bytes]) -> None:
            headers = make_forwarded_headers(context.peer(), context.invocation_metadata(), self.proxies)

            async def run() -> None:
                if not is_probe:
                    await self.admission_check.require_accepted(headers)
                with await budget.reserve(identify_caller(headers)) as reservation:
                    message = await _receive_message(context, patience_s)
                    if message is None:
                        raise CallError(Code.INVALID_ARGUMENT, "the call must have a message")
                    _require_length(message, max_bytes)
                    reservation.resize(len(message))
                    response = await respond(message, headers, reservation)
                    del message
                    await self.send_message(context, response)

            await self.run_call(run, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def make_stream_handler(
        self,
        respond: Responder,
        make_error_response: Callable[[bytes, CallError], bytes],
        *,
        key_free_budget: MessageBudget | None = None,
    ) -> grpc.RpcMethodHandler:
        """Make the handler of a method whose messages have one response each, in their order.

        A message is received when the response to the one before has been sent.  A stream has room for one message
        as long as it is open; all streams together have half of the room that there is.

        Args:
            make_error_response: makes the response to a message whose processing failed.
            key_free_budget: for the messages of a method that needs no key, which must arrive soon; None if it
                needs one.
        """
        budget = key_free_budget or self.budget
        patience_s = None if key_free_budget is None else _KEY_FREE_RECEIVE_S
        max_bytes = budget.max_message_bytes if key_free_budget is None else _MAX_SMALL_BYTES
        slots = asyncio.Semaphore(max(1, budget.free_bytes // budget.max_message_bytes // 2))

        async def handle(messages: Any, context: aio.ServicerContext[bytes, bytes]) -> None:
            headers = make_forwarded_headers(context.peer(), context.invocation_metadata(), self.proxies)

            async def run() -> None:
                if key_free_budget is None:
                    await self.admission_check.require_accepted(headers)
                if slots.locked():
                    raise CallError(
                        Code.RESOURCE_EXHAUSTED, "as many streams are open as there is memory for", _RETRY_AFTER_S
                    )
                async with slots:
                    with await budget.reserve(identify_caller(headers)) as reservation:
                        reservation.least_bytes = budget.max_message_bytes
                        await respond_to_all(reservation)

            async def respond_to_all(reservation: MessageReservation) -> None:
                while (message := await self.stream_drain.receive_message(context, patience_s)) is not None:
                    try:
                        _require_length(message, max_bytes)
                        response = await respond(message, headers, reservation)
                    except CallError as error:
                        response = make_error_response(message, error)
                    del message
                    await self.send_message(context, response)
                    del response
                    reservation.resize(0)

            await self.run_call(run, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def send_message(self, context: aio.ServicerContext[bytes, bytes], message: bytes) -> None:
        """Send a response, which waits until its client has read most of it.

        The connection of a client that does not read it in time is closed, by which the call is cancelled.
        """
        loop, close = asyncio.get_running_loop(), self.connection_closer.close_soon
        closing = loop.call_later(self.send_s, close, context.peer())
        try:
            await context.write(message)
        finally:
            closing.cancel()

    async def receive_probe(self, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        """Receive the message of a call that needs no key; it is empty if there is none."""
        headers = make_forwarded_headers(context.peer(), context.invocation_metadata(), self.proxies)
        with await self.probe_budget.reserve(identify_caller(headers)):
            return await _receive_message(context, _KEY_FREE_RECEIVE_S) or b""

    async def run_call(
        self, run: Callable[[], Awaitable[None]], context: aio.ServicerContext[bytes, bytes]
    ) -> None:
        """Run a call, and end it with the status of the error that it raises."""
        try:
            status = await self._find_error_status(run)
            if status is not None:
                await context.abort(*status)
        except aio.InternalError:
            # The client's connection has ended before gRPC has cancelled the call.
            raise asyncio.CancelledError from None

    async def _find_error_status(
        self, run: Callable[[], Awaitable[None]]
    ) -> tuple[grpc.StatusCode, str, tuple[tuple[str, Any], ...]] | None:
        """Run a call; return the status of the error that it raises, or None.

        The error itself is let go: its traceback has the call's message.
        """
        try:
            await run()
            return None
        except CallError as error:
            return error.code, error.detail, make_trailer(error)
        except aio.InternalError:
            raise
        except Exception as error:
            self.failures.warning("a call failed in the gateway: %r", error)
            return Code.INTERNAL, "internal error in the gateway", ()


async def _receive_message(context: aio.ServicerContext[bytes, bytes], patience_s: float) -> bytes | None:
    """Receive the message of a call within `patience_s`; return None if it has none.

    Raises:
        CallError: there was no message for too long.
    """
    try:
        async with asyncio.timeout(patience_s):
            message: Any = await context.read()
    except TimeoutError:
        raise _make_late_error(patience_s) from None
    return None if message is aio.EOF else message


def _require_length(message: bytes, max_bytes: int) -> None:
    """Raise the error of a message that is too long for its method."""
    if len(message) > max_bytes:
        raise CallError(Code.RESOURCE_EXHAUSTED, f"a message must be at most {max_bytes} bytes, got {len(message)}")


def _make_late_error(patience_s: float | None) -> CallError:
    return CallError(Code.DEADLINE_EXCEEDED, f"the call's message must arrive within {patience_s:g} s")
