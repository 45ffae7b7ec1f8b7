"""The asynchronous client: the blocking one's methods as coroutines."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from normserve.client import administration, operations
from normserve.client.errors import ClientError, transport_errors
from normserve.client.protocol import DEFAULT_URL, Answer, Call, adopt, connection
from normserve.client.retries import Attempts, RetryPolicy

P = ParamSpec("P")
R = TypeVar("R")


def _operation(
    build: Callable[P, Call[R]],
) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]":
    async def operation(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(build(*args, **kwargs))

    adopt(operation, build)
    return operation


class AsyncClient:
    """A normserve at some URL.  Tasks may share one; close it, or use it in an `async with`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 60.0,
        retries: RetryPolicy | None = None,
        max_connections: int = 100,
        verify: ssl.SSLContext | str | bool = True,
        certificate: str | tuple[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Args: as `Client`; the transport is one of httpx's asynchronous ones."""
        self._retries = retries or RetryPolicy()
        options = connection(url, api_key, timeout_s, max_connections, verify, certificate)
        self._http = httpx.AsyncClient(transport=transport, **options)

    layer_norm = _operation(operations.layer_norm)
    rms_norm = _operation(operations.rms_norm)
    group_norm = _operation(operations.group_norm)
    layer_norm_backward = _operation(operations.layer_norm_backward)
    rms_norm_backward = _operation(operations.rms_norm_backward)
    group_norm_backward = _operation(operations.group_norm_backward)
    put_layer = _operation(administration.put_layer)
    layers = _operation(administration.layers)
    layer = _operation(administration.layer)
    delete_layer = _operation(administration.delete_layer)
    info = _operation(administration.info)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[R]) -> R:
        attempts = Attempts(self._retries)
        while True:
            try:
                return call.read(await self._exchange(call))
            except ClientError as failure:
                pause_s = attempts.pause_after(failure)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _exchange(self, call: Call[R]) -> Answer:
        body = bytearray()
        request = self._http.build_request(
            call.method, call.path, params=call.params, headers=call.headers, content=call.async_chunks()
        )
        with transport_errors():
            response = await self._http.send(request, stream=True)
            try:
                async for chunk in response.aiter_bytes():
                    body += chunk
            finally:
                await response.aclose()
        return Answer(response.status_code, response.headers, memoryview(body))
