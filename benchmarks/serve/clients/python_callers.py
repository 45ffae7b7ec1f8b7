"""Callers of a server from Python, one connection each: arrays in, arrays out."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import httpx
import numpy as np
from normserve.client import AsyncClient, Client
from normserve.client.http.server_address import ServerAddress
from normserve.codec import safetensors
from normserve.memory.tensors import DType

SOCKET = "socket"

_SAFETENSORS = "application/x-safetensors"


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """The address of a server, and its certificate authority.

    Attributes:
        url: of the server.
        layer: the registered layer.
        authority: for https, the file of the certificate authority.
    """

    url: str
    layer: str
    authority: str | None = None

    @property
    def target(self) -> str:
        """The request's path and query."""
        return f"/v1/layer_norm?layer={self.layer}"

    def make_tls_context(self) -> ssl.SSLContext | None:
        """The TLS context for https."""
        return None if self.authority is None else ssl.create_default_context(cafile=self.authority)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Times and last result of some calls."""

    seconds: list[float]
    results: list[np.ndarray]


class BlockingCaller:
    """Calls a function in a loop."""

    def __init__(self, call: Callable[[], np.ndarray]) -> None:
        self._call = call

    def measure(self, least: int, seconds: float) -> CallTimes:
        """Call for `seconds`, and at least `least` times."""
        taken: list[float] = []
        began = ended = time.perf_counter()
        while len(taken) < least or ended - began < seconds:
            sent = time.perf_counter()
            y = self._call()
            ended = time.perf_counter()
            taken.append(ended - sent)
            result = y
            del y
        return CallTimes(taken, [result])


class AsyncCaller:
    """Calls an asynchronous client in a loop."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient, x: np.ndarray, layer: str) -> None:
        self._runner = runner
        self._client = client
        self._x = x
        self._layer = layer

    def measure(self, least: int, seconds: float) -> CallTimes:
        """As `BlockingCaller.measure`."""
        return self._runner.run(self._measure(least, seconds))

    async def _measure(self, least: int, seconds: float) -> CallTimes:
        taken: list[float] = []
        began = ended = time.perf_counter()
        while len(taken) < least or ended - began < seconds:
            sent = time.perf_counter()
            result = await self._client.layer_norm(self._x, layer=self._layer)
            ended = time.perf_counter()
            taken.append(ended - sent)
            y = result.y
            del result
        return CallTimes(taken, [y])


def _make_socket_call(
    connected: socket.socket, endpoint: ServerEndpoint, x: np.ndarray
) -> Callable[[], np.ndarray]:
    """Do only the necessary work of a caller: send a prepared request and receive its response."""
    header = safetensors.encode_header({"x": (DType.FLOAT32, x.shape)})
    head = f"POST {endpoint.target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {_SAFETENSORS}\r\n"
    head += f"Content-Length: {len(header) + x.nbytes}\r\n\r\n"
    request = head.encode() + header + x.tobytes()

    def call() -> np.ndarray:
        connected.sendall(request)
        came = b""
        while (end := came.find(b"\r\n\r\n")) < 0:
            came += connected.recv(65536)
        _, _, length = came[:end].lower().partition(b"content-length: ")
        body = np.empty(int(length.partition(b"\r\n")[0]), np.uint8)
        have = len(came) - end - 4
        body[:have] = np.frombuffer(came, np.uint8, offset=end + 4)
        view = body.data
        while have < len(view):
            have += connected.recv_into(view[have:])
        start = 8 + int.from_bytes(view[:8], "little")
        return body[start:].view(np.float32).reshape(x.shape)

    return call


@contextlib.contextmanager
def _open_socket_caller(endpoint: ServerEndpoint, x: np.ndarray, _: asyncio.Runner) -> Iterator[BlockingCaller]:
    address, context = ServerAddress.parse_url(endpoint.url), endpoint.make_tls_context()
    with contextlib.ExitStack() as stack:
        if address.socket_path is not None:
            connected = stack.enter_context(socket.socket(socket.AF_UNIX))
            connected.connect(address.socket_path)
        else:
            connected = stack.enter_context(socket.create_connection((address.host, address.port)))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            connected = stack.enter_context(context.wrap_socket(connected, server_hostname=address.host))
        yield BlockingCaller(_make_socket_call(connected, endpoint, x))


@contextlib.contextmanager
def _open_client_caller(endpoint: ServerEndpoint, x: np.ndarray, _: asyncio.Runner) -> Iterator[BlockingCaller]:
    with Client(endpoint.url, verify=endpoint.authority or True, max_connections=1) as client:
        yield BlockingCaller(lambda: client.layer_norm(x, layer=endpoint.layer).y)


@contextlib.contextmanager
def _open_async_caller(endpoint: ServerEndpoint, x: np.ndarray, runner: asyncio.Runner) -> Iterator[AsyncCaller]:
    client = AsyncClient(endpoint.url, verify=endpoint.authority or True, max_connections=1)
    try:
        yield AsyncCaller(runner, client, x, endpoint.layer)
    finally:
        runner.run(client.close())


@contextlib.contextmanager
def _open_httpx_caller(endpoint: ServerEndpoint, x: np.ndarray, _: asyncio.Runner) -> Iterator[BlockingCaller]:
    """A request in the form of httpx's documentation, with the codec's own encoding."""
    address = ServerAddress.parse_url(endpoint.url)
    header = safetensors.encode_header({"x": (DType.FLOAT32, x.shape)})
    transport = httpx.HTTPTransport(uds=address.socket_path, verify=endpoint.make_tls_context() or True)
    url = "http://localhost" if address.socket_path is not None else endpoint.url

    def call(http: httpx.Client) -> np.ndarray:
        answer = http.post(endpoint.target, content=header + x.tobytes(), headers={"content-type": _SAFETENSORS})
        answer.raise_for_status()
        data = safetensors.decode(memoryview(answer.content))["y"].data
        return np.frombuffer(data, np.float32).reshape(x.shape)

    with httpx.Client(base_url=url, transport=transport, timeout=60) as http:
        yield BlockingCaller(lambda: call(http))


#: By the names in the results.
CALLERS: Mapping[
    str,
    Callable[[ServerEndpoint, np.ndarray, asyncio.Runner], AbstractContextManager[BlockingCaller | AsyncCaller]],
] = {
    SOCKET: _open_socket_caller,
    "Client": _open_client_caller,
    "AsyncClient": _open_async_caller,
    "httpx": _open_httpx_caller,
}
