"""The asynchronous client: the blocking one's methods as coroutines."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx

from normserve.client import administration, operations
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError
from normserve.client.protocol import DEFAULT_URL, Answer, Call, adopt, connection, refuse_redirect, shown
from normserve.client.reception import Reception, transport_errors
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
        """Args and errors: as `Client`; the transport is one of httpx's asynchronous ones, of any make."""
        self._retries = retries or RetryPolicy()
        self._timeout_s = timeout_s
        self._api_key = api_key
        options = connection(url, api_key, timeout_s, max_connections, verify, certificate)
        self._http = httpx.AsyncClient(transport=transport, event_hooks={"response": [_refuse_redirect]}, **options)

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

    def __repr__(self) -> str:
        return shown(self, self._http.base_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[R]) -> R:
        deadline = Deadline(self._timeout_s)
        attempts = Attempts(self._retries, deadline)
        while True:
            try:
                return call.read(await self._exchange(call, deadline), self._api_key)
            except ClientError as failure:
                pause_s = attempts.pause_after(failure)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _exchange(self, call: Call[R], deadline: Deadline) -> Answer:
        request = self._http.build_request(
            call.method, call.path, params=call.params, headers=call.headers, content=call.async_chunks()
        )
        with transport_errors(deadline):
            async with asyncio.timeout(deadline.left_s()):
                response = await self._http.send(request, stream=True)
                try:
                    reception = Reception(response.status_code, response.headers, call.most_bytes)
                    if reception.is_wanted:
                        # As it comes: httpx's own iterators would decompress it.
                        async for piece in cast(httpx.AsyncByteStream, response.stream):
                            reception.take(piece)
                            if not reception.is_wanted:
                                break
                finally:
                    await response.aclose()
        return Answer(response.status_code, response.headers, memoryview(reception.body))


async def _refuse_redirect(response: httpx.Response) -> None:
    refuse_redirect(response)
