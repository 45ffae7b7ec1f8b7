"""`grpc.health.v1.Health`: whether the server is ready, as its own probe says."""

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from normserve.grpc.caller import Header
from normserve.grpc.calls import CallRunner
from normserve.grpc.inference_messages import parse_message
from normserve.grpc.message_budget import MessageReservation
from normserve.grpc.schema import HEALTH, INFERENCE, list_methods
from normserve.grpc.server_client import ServerClient
from normserve.grpc.statuses import CallError, Code

_REQUEST, _RESPONSE = list_methods(HEALTH)["Check"]
_SERVING, _NOT_SERVING = 1, 2
_SERVICES = ("", INFERENCE, HEALTH)

_POLL_S = 1.0
_MAX_WATCHES = 64


@dataclass
class HealthService:
    """The health of the server behind the gateway.

    Attributes:
        is_ending: whether the gateway takes no more calls, or is about to.
        watch_count: the number of open calls of `Watch`.
    """

    server: ServerClient
    is_ending: bool = False
    watch_count: int = 0

    def make_handlers(self, calls: CallRunner) -> grpc.GenericRpcHandler:
        """Make the handlers of `Check` and `Watch`."""
        handlers = {
            "Check": calls.make_handler(self.check, is_probe=True),
            "Watch": grpc.stream_stream_rpc_method_handler(functools.partial(self.watch, calls)),
        }
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    async def check(self, message: bytes, headers: list[Header], reservation: MessageReservation) -> bytes:
        """Return the state of the server, as the bytes of a HealthCheckResponse.

        Raises:
            CallError: the request names an unknown service.
        """
        service = parse_message(_REQUEST, message).service
        if service not in _SERVICES:
            raise CallError(Code.NOT_FOUND, f"the services are {INFERENCE} and {HEALTH}")
        return _serialise(await self._find_state())

    async def watch(self, calls: CallRunner, messages: Any, context: aio.ServicerContext[bytes, bytes]) -> None:
        """Send the state of the server at once and whenever it changes, whichever service the caller names."""

        async def run() -> None:
            if self.watch_count >= _MAX_WATCHES:
                raise CallError(Code.RESOURCE_EXHAUSTED, f"{_MAX_WATCHES} calls watch the health already")
            self.watch_count += 1
            try:
                await calls.receive_probe(context)
                await self._send_changes(calls, context)
            finally:
                self.watch_count -= 1

        await calls.run_call(run, context)

    async def _send_changes(self, calls: CallRunner, context: aio.ServicerContext[bytes, bytes]) -> None:
        """Send the state at once and whenever it changes, until the gateway ends."""
        last = None
        while True:
            state = await self._find_state()
            if state != last:
                await calls.send_message(context, _serialise(state))
            if self.is_ending:
                return
            last = state
            await asyncio.sleep(_POLL_S)

    async def _find_state(self) -> int:
        if self.is_ending:
            return _NOT_SERVING
        with contextlib.suppress(CallError):
            response = await self.server.send_request("GET", "/v2/health/ready", [])
            return _SERVING if response.status == 200 else _NOT_SERVING
        return _NOT_SERVING


def _serialise(state: int) -> bytes:
    serialised: bytes = _RESPONSE(status=state).SerializeToString()
    return serialised
