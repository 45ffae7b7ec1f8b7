"""A call of the API without input or output: the request, and how the response is read."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlencode

from normserve.client.answers.answer import ApiResponse
from normserve.client.answers.expectations import ExpectedResult
from normserve.client.answers.failures import make_api_error
from normserve.client.answers.reception import DOCUMENT_BYTES
from normserve.client.calls import arrays
from normserve.client.errors import UnexpectedAnswerError
from normserve.codec import safetensors
from normserve.memory.host_tensors import DType, HostTensor

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[R]):
    """One request, and how its answer is read.

    Attributes:
        method, path, params: as in HTTP; the path is relative to the server's URL.
        read_result: makes the result of a successful answer.
        tensors: what is sent, by the API's names; None is no body.
        expected_results: the tensors of a successful answer; None where it holds none.
        statuses: those of a successful answer.
        max_bytes: what the body of a successful answer can have.
    """

    method: str
    path: str
    read_result: Callable[[ApiResponse], R]
    params: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, HostTensor] | None = None
    expected_results: Mapping[str, ExpectedResult] | None = None
    statuses: tuple[int, ...] = (200,)
    max_bytes: int = DOCUMENT_BYTES

    @property
    def encoded_query(self) -> str:
        """The parameters as a URL has them."""
        return _encode_query(tuple(self.params.items())) if self.params else ""

    @property
    def target(self) -> str:
        """The path with its query."""
        return _make_target(self.path, tuple(self.params.items()))

    def encode_body(self) -> list[bytes | memoryview] | None:
        """The tensors as safetensors in pieces, of which all but the first are their own memory; None is no body.

        Raises:
            ValueError: a tensor is in column-major order, or its memory of another size than its shape asks for.
        """
        return None if self.tensors is None else _encode_tensors(self.tensors)

    def read_response(self, answer: ApiResponse, api_key: str | None = None) -> R:
        """Return what the answer says.

        Args: api_key: what no error may repeat.

        Raises:
            ApiError: it is a problem document, or an error of a proxy.
            UnexpectedAnswerError: it is nothing that was asked for.
        """
        if answer.status >= 400:
            raise make_api_error(answer.status, answer.headers, bytes(answer.body), api_key)
        if answer.status not in self.statuses:
            expected = " or ".join(map(str, self.statuses))
            raise UnexpectedAnswerError(f"the answer's status must be {expected}, or an error, got {answer.status}")
        return self.read_result(answer)


# What callers ask for is often the same, but for the numbers in it.
_KEPT = 256


@functools.lru_cache(_KEPT)
def _encode_query(params: tuple[tuple[str, str], ...]) -> str:
    return urlencode(params)


@functools.lru_cache(_KEPT)
def _make_target(path: str, params: tuple[tuple[str, str], ...]) -> str:
    return f"{path}?{_encode_query(params)}" if params else path


def _encode_tensors(tensors: Mapping[str, HostTensor]) -> list[bytes | memoryview]:
    """As `safetensors.encode`."""
    for name, tensor in tensors.items():
        if tensor.fortran_order or tensor.data.nbytes != tensor.nbytes:
            # Which says what is wrong.
            return safetensors.encode({name: tensor})
    header, order = _encode_header(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]))
    return [header, *(tensors[name].data for name in order)]


@functools.lru_cache(_KEPT)
def _encode_header(described: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> tuple[bytes, list[str]]:
    """All that precedes the data, and the order of those."""
    tensors = {name: (dtype, shape) for name, dtype, shape in described}
    return safetensors.encode_header(tensors), safetensors.sort_by_element_size(tensors)


def describe_tensors(tensors: Mapping[str, object]) -> dict[str, HostTensor]:
    """Return the memory of these arrays; one that is None is left out.

    Raises:
        TypeError: one is no array, or of no element type of the API.
    """
    return {name: arrays.describe_array(name, value) for name, value in tensors.items() if value is not None}


def make_query(params: Mapping[str, object]) -> dict[str, str]:
    """Return the query that carries these parameters; one that is None is left out."""
    return {name: _format_parameter(value) for name, value in params.items() if value is not None}


def _format_parameter(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
