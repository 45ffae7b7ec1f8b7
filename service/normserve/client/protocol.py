"""HTTP as the API speaks it, without any input or output: what to send, and what an answer means.

`Client` and `AsyncClient` are thin drivers of what is here and in `calls`.
"""

import inspect
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, get_args

import httpx

from normserve.client import arrays
from normserve.client.errors import UnexpectedAnswerError, api_error
from normserve.client.results import Timing
from normserve.codec import safetensors
from normserve.codec.media_types import CANONICAL, SAFETENSORS
from normserve.errors import NormserveError
from normserve.tensors import HostTensor

R = TypeVar("R")

DEFAULT_URL = "http://127.0.0.1:8000"

# Large enough for its overhead to be nothing, small enough for the transport's copy of it to stay in cache.
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: memoryview

    def json(self) -> Any:
        """What the body says, if it is JSON.

        Raises:
            UnexpectedAnswerError: it is not.
        """
        try:
            return json.loads(bytes(self.body))
        except ValueError:
            raise UnexpectedAnswerError("the answer must be JSON, it is not") from None

    def tensors(self) -> dict[str, HostTensor]:
        """The tensors in the body, as views of it.

        Raises:
            UnexpectedAnswerError: it holds none that the codec can read.
        """
        media_type = self.headers.get("content-type", "")
        if CANONICAL.get(media_type) != SAFETENSORS:
            raise UnexpectedAnswerError(f"the answer must be {SAFETENSORS}, got {media_type[:100]!r}")
        try:
            return safetensors.decode(self.body)
        except NormserveError as error:
            raise UnexpectedAnswerError(f"the answer is no safetensors: {error.detail}") from error

    def timing(self) -> Timing:
        """What the headers say about how the request was served."""
        return Timing(
            stages_ms=_read_stages(self.headers.get("server-timing", "")),
            kernel_bytes=int(self.headers.get("x-kernel-bytes", 0)),
            kernel_bandwidth=float(self.headers.get("x-kernel-bandwidth", 0)),
            batch_size=int(self.headers.get("x-batch-size", 1)),
            request_id=self.headers.get("x-request-id", ""),
        )


def _read_stages(server_timing: str) -> dict[str, float]:
    stages = {}
    for metric in server_timing.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur":
                stages[name] = float(value)
    return stages


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One request, and how its answer is read.

    Attributes:
        method, path, params: as in HTTP; the path is relative to the server's URL.
        parts: the body in pieces, sent one after another; None is no body.
        understand: makes the result of a successful answer.
    """

    method: str
    path: str
    understand: Callable[[Answer], R]
    params: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[bytes | memoryview] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the body."""
        if self.parts is None:
            return {}
        length = sum(len(part) for part in self.parts)
        return {"content-type": SAFETENSORS, "content-length": str(length)}

    def chunks(self) -> Iterator[bytes] | None:
        """The body, never joined, from its beginning at each call."""
        return None if self.parts is None else _chunks(self.parts)

    def async_chunks(self) -> AsyncIterator[bytes] | None:
        """`chunks` for who awaits them."""
        return None if self.parts is None else _async_chunks(self.parts)

    def read(self, answer: Answer) -> R:
        """Return what the answer says.

        Raises:
            ApiError: it is a problem document, or an error of whoever stands between.
            UnexpectedAnswerError: it is nothing that the API knows.
        """
        if answer.status >= 400:
            raise api_error(answer.status, answer.headers, bytes(answer.body))
        if answer.status >= 300:
            raise UnexpectedAnswerError(f"the answer's status must be 2xx, 4xx or 5xx, got {answer.status}")
        return self.understand(answer)


def _chunks(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK_BYTES):
            # httpx is typed for bytes and content with any buffer of bytes.
            yield cast(bytes, view[start : start + _CHUNK_BYTES])


async def _async_chunks(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    for chunk in _chunks(parts):
        yield chunk


def payload(tensors: Mapping[str, object]) -> Sequence[bytes | memoryview]:
    """Return the body that carries these arrays; one that is None is left out.

    Raises:
        TypeError: one is no array, or of no element type of the API.
    """
    given = {name: arrays.to_host(name, value) for name, value in tensors.items() if value is not None}
    return safetensors.encode(given)


def query(params: Mapping[str, object]) -> dict[str, str]:
    """Return the query that carries these parameters; one that is None is left out."""
    return {name: _text(value) for name, value in params.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def connection(
    url: str,
    api_key: str | None,
    timeout_s: float | None,
    connections: int,
    verify: ssl.SSLContext | str | bool = True,
    certificate: str | tuple[str, str] | None = None,
) -> dict[str, Any]:
    """What httpx must know about a server, for its blocking and its asynchronous client alike."""
    # Compression would cost more time than the bytes that it saves: floats hardly shrink.
    headers = {"accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout_s),
        "limits": limits,
        "verify": _trust(verify, certificate),
    }


def _trust(verify: ssl.SSLContext | str | bool, certificate: str | tuple[str, str] | None) -> ssl.SSLContext | bool:
    """What httpx is told about TLS; it deprecates paths."""
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    if certificate is None:
        return verify
    context = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
    context.load_cert_chain(*((certificate,) if isinstance(certificate, str) else certificate))
    return context


def adopt(method: Callable[..., Any], build: Callable[..., Any]) -> None:
    """Give a method that sends what `build` makes the name, text and signature of `build`."""
    signature = inspect.signature(build)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__ = build.__name__
    method.__doc__ = build.__doc__
    (result,) = get_args(signature.return_annotation)
    vars(method)["__signature__"] = signature.replace(
        parameters=[itself, *signature.parameters.values()], return_annotation=result
    )
