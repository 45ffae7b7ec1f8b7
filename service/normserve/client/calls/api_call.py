"""A call of the API without input or output: the request, and the reading of its response."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from urllib.parse import urlencode

from normserve.client.calls import array_conversion
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.responses.api_errors import make_api_error
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import DOCUMENT_BYTES
from normserve.client.responses.expected_results import ExpectedResult
from normserve.codec import safetensors
from normserve.memory.tensors import DType, HostTensor

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[R]):
    """A request of the API for any transport, with the function that turns its response into a result.

    Attributes:
        method, path, params: as in HTTP; the path is relative to the server's URL.
        read_result: makes the result of a successful response.
        tensors: those of the body, by their names in the API; None is no body.
        expected_results: the tensors of a successful response; None where it holds none.
        statuses: those of a successful response.
        max_bytes: the most bytes that the body of a successful response can have.
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
        """The URL-encoded parameters."""
        return _encode_query(tuple(self.params.items())) if self.params else ""

    @property
    def target(self) -> str:
        """The path with its query."""
        return _make_target(self.path, tuple(self.params.items()))

    def assume_per_head_parameters(self) -> "ApiCall[R] | None":
        """Return this call with the results expected of a layer that has separate parameters for each head.

        None if no result depends on whether a registered layer has parameters for each head.
        """
        results = self.expected_results
        if results is None or not any(each.possible_head_count for each in results.values()):
            return None
        return replace(
            self, expected_results={name: each.assume_per_head_parameters() for name, each in results.items()}
        )

    def encode_body(self) -> list[bytes | memoryview] | None:
        """Encode the tensors as safetensors; return None for a call without a body.

        The parts are a header, and the tensors' own buffers, which are not copied.

        Raises:
            ValueError: a tensor is in column-major order, or its memory of another size than its shape asks for.
        """
        return None if self.tensors is None else _encode_tensors(self.tensors)

    def read_response(self, answer: ApiResponse, api_key: str | None = None) -> R:
        """Convert a response to the call's result, or raise the error that the response describes.

        Args: api_key: left out of the text of errors.

        Raises:
            ApiError: the response is a problem document, or an error of a proxy.
            UnexpectedAnswerError: the response does not fit the request.
        """
        if answer.status >= 400:
            raise make_api_error(answer.status, answer.headers, bytes(answer.body), api_key)
        if answer.status not in self.statuses:
            expected = " or ".join(map(str, self.statuses))
            raise UnexpectedAnswerError(f"the answer's status must be {expected}, or an error, got {answer.status}")
        return self.read_result(answer)


# Callers often repeat a request with other contents of the tensors.
_CACHE_SIZE = 256


@functools.lru_cache(_CACHE_SIZE)
def _encode_query(params: tuple[tuple[str, str], ...]) -> str:
    return urlencode(params)


@functools.lru_cache(_CACHE_SIZE)
def _make_target(path: str, params: tuple[tuple[str, str], ...]) -> str:
    return f"{path}?{_encode_query(params)}" if params else path


def _encode_tensors(tensors: Mapping[str, HostTensor]) -> list[bytes | memoryview]:
    """Encode tensors as safetensors: a header, and the tensors' own buffers in the header's order.

    The header is cached by names, dtypes and shapes, because callers often repeat them.

    Raises:
        ValueError: a tensor is in column-major order, or its memory of another size than its shape asks for.
    """
    for name, tensor in tensors.items():
        if tensor.fortran_order or tensor.data.nbytes != tensor.nbytes:
            # Raises the error.
            return safetensors.encode({name: tensor})
    header, order = _encode_header(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]))
    return [header, *(tensors[name].data for name in order)]


@functools.lru_cache(_CACHE_SIZE)
def _encode_header(described: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> tuple[bytes, list[str]]:
    """Return the bytes that precede the data, and the tensors' names in the order of their data."""
    tensors = {name: (dtype, shape) for name, dtype, shape in described}
    return safetensors.encode_header(tensors), safetensors.sort_by_element_size(tensors)


def describe_tensors(tensors: Mapping[str, object]) -> dict[str, HostTensor]:
    """Return a `HostTensor` (dtype, shape and memory) for each array; leave out arrays that are None.

    Raises:
        TypeError: one is no array, or of no element type of the API.
    """
    return {
        name: array_conversion.describe_array(name, value) for name, value in tensors.items() if value is not None
    }


def make_query(params: Mapping[str, object]) -> dict[str, str]:
    """Return the query that carries these parameters; a parameter that is None is left out."""
    return {name: _format_parameter(value) for name, value in params.items() if value is not None}


def _format_parameter(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
