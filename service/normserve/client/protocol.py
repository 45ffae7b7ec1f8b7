"""HTTP as the API speaks it, without any input or output: what to send, and what an answer means.

`Client` and `AsyncClient` are thin drivers of what is here and in `calls`.
"""

import inspect
import math
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from typing import Any, Generic, TypeVar, cast, get_args

import httpx

from normserve.client import arrays
from normserve.client.deadlines import check_timeout
from normserve.client.documents import read_json
from normserve.client.errors import UnexpectedAnswerError, api_error
from normserve.client.quoting import quoted
from normserve.client.reception import DOCUMENT_BYTES
from normserve.client.results import Timing
from normserve.codec import safetensors
from normserve.codec.media_types import CANONICAL, SAFETENSORS
from normserve.errors import NormserveError
from normserve.memory.host_tensors import HostTensor

R = TypeVar("R")

DEFAULT_URL = "http://127.0.0.1:8000"

# Large enough for its overhead to be nothing, small enough for the transport's copy of it to stay in cache.
_CHUNK_BYTES = 256 * 1024

# Types that a message may name: those of servers that are none of ours.
_FAMILIAR = ("text/html", "text/plain", "application/json", "application/problem+json", "application/x-npy")


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
            return read_json(bytes(self.body))
        except ValueError:
            raise UnexpectedAnswerError("the answer must be JSON, it is not") from None

    def object(self) -> dict[str, Any]:
        """What the body says, if it is a JSON object.

        Raises:
            UnexpectedAnswerError: it is not.
        """
        found = self.json()
        if not isinstance(found, dict):
            raise UnexpectedAnswerError("the answer must be a JSON object, it is not")
        return found

    def tensors(self) -> dict[str, HostTensor]:
        """The tensors in the body, as views of it.

        Raises:
            UnexpectedAnswerError: it holds none that the codec can read.
        """
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if CANONICAL.get(media_type) != SAFETENSORS:
            got = media_type if media_type in _FAMILIAR else "something else"
            raise UnexpectedAnswerError(f"the answer must be {SAFETENSORS}, got {got}")
        try:
            return safetensors.decode(self.body)
        except NormserveError as error:
            raise UnexpectedAnswerError(f"the answer is no safetensors: {error.detail}") from error

    def timing(self) -> Timing:
        """What the headers say about how the request was served; what means nothing is taken as left out."""
        headers = self.headers
        return Timing(
            stages_ms=_read_stages(headers.get("server-timing", "")),
            kernel_bytes=_whole(headers.get("x-kernel-bytes"), 0),
            kernel_bandwidth=_amount(headers.get("x-kernel-bandwidth")) or 0.0,
            batch_size=max(1, _whole(headers.get("x-batch-size"), 1)),
            request_id=quoted(headers.get("x-request-id"), 128),
        )


def _read_stages(server_timing: str) -> dict[str, float]:
    stages = {}
    for metric in server_timing.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur" and (duration_ms := _amount(value)) is not None:
                stages[quoted(name, 64)] = duration_ms
    return stages


def _whole(text: str | None, default: int) -> int:
    """A whole number of at most 18 digits."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 19 else default


def _amount(text: str | None) -> float | None:
    """A finite number that is not negative; None for anything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One request, and how its answer is read.

    Attributes:
        method, path, params: as in HTTP; the path is relative to the server's URL.
        parts: the body in pieces, sent one after another; None is no body.
        understand: makes the result of a successful answer.
        statuses: those of a successful answer.
        most_bytes: what the body of a successful answer can have.
    """

    method: str
    path: str
    understand: Callable[[Answer], R]
    params: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[bytes | memoryview] | None = None
    statuses: tuple[int, ...] = (200,)
    most_bytes: int = DOCUMENT_BYTES

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

    def read(self, answer: Answer, api_key: str | None = None) -> R:
        """Return what the answer says.

        Args: api_key: what no error may repeat.

        Raises:
            ApiError: it is a problem document, or an error of whoever stands between.
            UnexpectedAnswerError: it is nothing that was asked for.
        """
        if answer.status >= 400:
            raise api_error(answer.status, answer.headers, bytes(answer.body), api_key)
        if answer.status not in self.statuses:
            expected = " or ".join(map(str, self.statuses))
            raise UnexpectedAnswerError(f"the answer's status must be {expected}, or an error, got {answer.status}")
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


def described(tensors: Mapping[str, object]) -> dict[str, HostTensor]:
    """Return the memory of these arrays; one that is None is left out.

    Raises:
        TypeError: one is no array, or of no element type of the API.
    """
    return {name: arrays.to_host(name, value) for name, value in tensors.items() if value is not None}


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
    """What httpx must know about a server, for its blocking and its asynchronous client alike.

    Raises:
        ValueError: the URL, the key or the timeout is none.
    """
    check_timeout(timeout_s)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    # The message does not repeat it: a URL may hold a password.
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError("the URL must be http://HOST:PORT or https://HOST:PORT")
    # Compression would cost more time than the bytes that it saves: floats hardly shrink.
    headers = {"accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {_checked(api_key)}"
    return {
        "base_url": parsed,
        "headers": headers,
        "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        # A request says itself how much time is left.
        "timeout": None,
        # The key must not go where a server points to, and a server has nothing to remember here.
        "follow_redirects": False,
        "cookies": _NoCookies(),
        "verify": _trust(verify, certificate),
    }


class _NoCookies(CookieJar):
    """Keeps none, and reads none: Python's reader of them meets errors that it does not expect."""

    def extract_cookies(self, response: object, request: object) -> None:
        """Leave them where they are."""


def _checked(api_key: str) -> str:
    # As part of a header, anything else fails with each request, and with the key in the error's text.
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip() and api_key):
        raise ValueError("the API key must be printable ASCII, without a blank or a line break at its ends")
    return api_key


def shown(kind: object, url: httpx.URL) -> str:
    """How a client shows itself: neither its key, nor a password in its URL, nor where it lies in memory."""
    return f"{type(kind).__name__}({str(url.copy_with(userinfo=b''))!r})"


def refuse_redirect(response: httpx.Response) -> None:
    """Refuse what points elsewhere, before httpx reads where.

    Raises:
        UnexpectedAnswerError: it does.
    """
    if 300 <= response.status_code < 400:
        raise UnexpectedAnswerError(f"the answer must not be a redirection, its status is {response.status_code}")


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
