"""The blocking client."""

import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar, cast

import httpx

from normserve.client import administration, operations
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError
from normserve.client.protocol import DEFAULT_URL, Answer, Call, adopt, connection, refuse_redirect, shown
from normserve.client.reception import Reception, transport_errors
from normserve.client.retries import Attempts, RetryPolicy
from normserve.client.waiting import keep_deadlines

P = ParamSpec("P")
R = TypeVar("R")


def _operation(build: Callable[P, Call[R]]) -> "Callable[Concatenate[Client, P], R]":
    def operation(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(build(*args, **kwargs))

    adopt(operation, build)
    return operation


class Client:
    """A normserve at some URL.  Threads may share one; close it, or use it in a `with`."""

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Args:
        url: where the server listens.
        api_key: sent as a bearer token, if the server wants one.
        timeout_s: how long a call may take as a whole: connecting, sending, receiving, all attempts and the
            pauses between them; None waits for ever.  Only the look-up of the host's name is the system's own
            time.
        retries: how a request is repeated that may succeed later; by default five attempts.
        max_connections: requests under way at once; more wait for one of them.
        verify: of https: True trusts well-known authorities, a path those in a PEM file, False anybody.
        certificate: of https: a PEM file with the client's certificate and key, or one for each.
        transport: httpx's, for a Unix socket for example: `httpx.HTTPTransport(uds=path)`.  One of another
            make is given the time that is left at an attempt's beginning, for each of its waits.

        Raises:
            ValueError: the URL, the key or the timeout is none.
        """
        self._retries = retries or RetryPolicy()
        self._timeout_s = timeout_s
        self._api_key = api_key
        options = connection(url, api_key, timeout_s, max_connections, verify, certificate)
        self._http = httpx.Client(transport=transport, event_hooks={"response": [refuse_redirect]}, **options)
        keep_deadlines(self._http)

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

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __repr__(self) -> str:
        return shown(self, self._http.base_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[R]) -> R:
        deadline = Deadline(self._timeout_s)
        attempts = Attempts(self._retries, deadline)
        while True:
            try:
                return call.read(self._exchange(call, deadline), self._api_key)
            except ClientError as failure:
                pause_s = attempts.pause_after(failure)
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def _exchange(self, call: Call[R], deadline: Deadline) -> Answer:
        request = self._http.build_request(
            call.method,
            call.path,
            params=call.params,
            headers=call.headers,
            content=call.chunks(),
            extensions={"timeout": deadline.timeouts()},
        )
        with transport_errors(deadline):
            response = self._http.send(request, stream=True)
            try:
                reception = Reception(response.status_code, response.headers, call.most_bytes)
                # As it comes: httpx's own iterators would decompress it.
                pieces = cast(httpx.SyncByteStream, response.stream) if reception.is_wanted else ()
                for piece in pieces:
                    deadline.check()
                    reception.take(piece)
                    if not reception.is_wanted:
                        break
            finally:
                response.close()
        return Answer(response.status_code, response.headers, memoryview(reception.body))
