"""The expected results of an operation, derived from the request.

Invalid requests, for example with an x of the wrong rank, have an expectation as well: the client does not
validate requests, the server does.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from normserve.client.errors import UnexpectedAnswerError
from normserve.codec import safetensors
from normserve.codec.api_names import OF_ROWS, OF_SAMPLES, PARAMETER_GRADIENTS, PARAMETERS
from normserve.memory.tensors import DType, HostTensor

_LENGTH_BYTES = 8
_Described = tuple[tuple[str, DType, tuple[int, ...]], ...]
_Query = tuple[tuple[str, str], ...]

# Bytes of an element of any type.
_WIDEST_BYTES = max(dtype.itemsize for dtype in DType)


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """The shape and dtype that one tensor of a response must have.

    Attributes:
        shape: its sizes.
        dtype: its element type; None where only the server knows it.
        is_optional: whether only the server knows if there is one.
        has_unknown_group_count: whether only the server knows the number of groups, the actual last size; `shape`
            then ends in the number of channels, which it must divide.
        possible_head_count: H if the layer may have separate parameters for each head, so that [H, *shape] is
            accepted, too; 0 if only `shape` is.
        allocated_bytes: the most bytes that the tensor has in `shape`, for which memory is allocated at
            first.
    """

    shape: tuple[int, ...]
    dtype: DType | None
    is_optional: bool = False
    has_unknown_group_count: bool = False
    possible_head_count: int = 0
    allocated_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        itemsize = _WIDEST_BYTES if self.dtype is None else self.dtype.itemsize
        object.__setattr__(self, "allocated_bytes", prod(self.shape) * itemsize)

    @property
    def max_bytes(self) -> int:
        """The most bytes that the tensor can have."""
        return self.allocated_bytes * max(1, self.possible_head_count)

    def assume_per_head_parameters(self) -> "ExpectedResult":
        """Return the result expected of a layer that has separate parameters for each head.

        That is this object itself if the shape does not depend on the layer's parameters.
        """
        if not self.possible_head_count:
            return self
        return replace(self, shape=(self.possible_head_count, *self.shape), possible_head_count=0)

    def find_fault(self, tensor: HostTensor) -> str | None:
        """Describe the mismatch between a tensor and this expectation; return None where there is none."""
        if tensor.dtype is self.dtype and tensor.shape == self.shape:
            return None
        if self.dtype not in (None, tensor.dtype):
            return f"be {self.dtype.value}, got {tensor.dtype.value}" if self.dtype else None
        if tensor.shape == self.shape or (self.has_unknown_group_count and self._is_group_shape(tensor.shape)):
            return None
        of_heads = (self.possible_head_count, *self.shape) if self.possible_head_count else self.shape
        if tensor.shape == of_heads:
            return None
        shapes = " or ".join([str(list(shape)) for shape in dict.fromkeys((self.shape, of_heads))])
        return f"be {shapes}, got {_format_shape(tensor.shape)}"

    def _is_group_shape(self, shape: tuple[int, ...]) -> bool:
        *samples, channels = self.shape
        return shape[:-1] == tuple(samples) and shape[-1] > 0 and channels % shape[-1] == 0


@dataclass(frozen=True)
class ExpectedResults:
    """The expected tensors of a response, by their names in the API."""

    by_name: Mapping[str, ExpectedResult]

    @functools.cached_property
    def max_bytes(self) -> int:
        """The most bytes of the response as safetensors: those of all tensors and the longest accepted header."""
        header = _LENGTH_BYTES + safetensors.REQUEST_LIMITS.max_header_bytes
        return header + sum(output.max_bytes for output in self.by_name.values())

    def check(self, tensors: Mapping[str, HostTensor]) -> None:
        """Raise UnexpectedAnswerError unless the tensors of a response are the expected ones.

        Raises:
            UnexpectedAnswerError: one is missing, is too many, or is of another shape or element type.
        """
        checked_count = 0
        for name, output in self.by_name.items():
            tensor = tensors.get(name)
            if tensor is None:
                if output.is_optional:
                    continue
                raise UnexpectedAnswerError(f"the answer must hold {name}, it does not")
            if fault := output.find_fault(tensor):
                raise UnexpectedAnswerError(f"the answer's {name} must {fault}")
            checked_count += 1
        # Unknown names may be anything, so the message does not repeat them.
        if len(tensors) > checked_count:
            raise UnexpectedAnswerError(f"the answer must hold no more than {', '.join(self.by_name)}, it does")
        for first, second in (("mean", "rstd"), PARAMETER_GRADIENTS):
            if first in tensors and second in tensors and tensors[first].shape != tensors[second].shape:
                raise UnexpectedAnswerError(f"the answer's {first} and {second} must be of one shape, they are not")


# Callers often repeat a request with other contents of the tensors.
_CACHE_SIZE = 256


def expect_forward(op: str, tensors: Mapping[str, HostTensor], params: Mapping[str, str]) -> ExpectedResults:
    """Return the names, shapes and dtypes that the tensors in the response to a forward request must have.

    Args:
        op: the operation's name in the API.
        tensors: the tensors of the request.
        params: the request's query.
    """
    described, query = _make_tensor_specs(tensors), tuple(params.items())
    return (
        _expect_numbered(_expect_forward, op, described, query)
        if "x.0" in tensors
        else _expect_forward(op, described, query)
    )


def expect_backward(op: str, tensors: Mapping[str, HostTensor], params: Mapping[str, str]) -> ExpectedResults:
    """Return the names, shapes and dtypes that the tensors in the response to a backward request must have.

    Args:
        op: the operation's name in the API.
        tensors: the tensors of the request.
        params: the request's query.
    """
    described, query = _make_tensor_specs(tensors), tuple(params.items())
    return (
        _expect_numbered(_expect_backward, op, described, query)
        if "x.0" in tensors
        else _expect_backward(op, described, query)
    )


def _make_tensor_specs(tensors: Mapping[str, HostTensor]) -> "_Described":
    return tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """The dtype and shape of a tensor of the request."""

    dtype: DType
    shape: tuple[int, ...]


@functools.lru_cache(_CACHE_SIZE)
def _expect_forward(op: str, described: "_Described", query: "_Query") -> ExpectedResults:
    """Return the expected results of a forward request with one x, from a cache for repeated requests.

    Args:
        described: the name, dtype and shape of each tensor of the request.
        query: the request's parameters.
    """
    tensors, params = _index_by_name(described), dict(query)
    x = tensors["x"]
    outputs = {"y": ExpectedResult(x.shape, _find_dtype(params.get("out_dtype"), x.dtype))}
    if "residual" in tensors:
        sums = x if op == "group_norm" else tensors["residual"]
        outputs["residual_out"] = ExpectedResult(x.shape, sums.dtype)
    if params.get("stats") in ("true", "1"):
        statistics = _expect_statistics(op, x.shape, params)
        outputs |= dict.fromkeys(("rstd",) if op == "rms_norm" else ("mean", "rstd"), statistics)
    if outputs["y"].dtype is DType.FLOAT8_E4M3FN and op != "group_norm":
        outputs["scale"] = ExpectedResult(x.shape[:-1], DType.FLOAT32)
    return ExpectedResults(outputs)


@functools.lru_cache(_CACHE_SIZE)
def _expect_backward(op: str, described: "_Described", query: "_Query") -> ExpectedResults:
    """Return the expected results of a backward request with one x, from a cache for repeated requests.

    Args:
        described: the name, dtype and shape of each tensor of the request.
        query: the request's parameters.
    """
    tensors, params = _index_by_name(described), dict(query)
    x = tensors["x"]
    outputs = {"dx": ExpectedResult(x.shape, x.dtype)}
    residual = tensors.get("residual")
    if op != "group_norm" and residual is not None and ("gate" in tensors or residual.dtype is not x.dtype):
        outputs["dresidual"] = ExpectedResult(x.shape, residual.dtype)
    for name in (*PARAMETERS, *OF_SAMPLES):
        if name in tensors:
            outputs[f"d{name}"] = ExpectedResult(tensors[name].shape, tensors[name].dtype)
    if "layer" in params:
        shape = (_find_parameter_size(op, x.shape, params),)
        # The layer's parameters may be of each head of x [..., H, N].
        heads = x.shape[-2] if not _has_samples(op, params) and len(x.shape) > 1 else 0
        outputs["dweight"] = ExpectedResult(shape, None, possible_head_count=heads)
        if op != "rms_norm":
            outputs["dbias"] = ExpectedResult(shape, None, is_optional=True, possible_head_count=heads)
    return ExpectedResults(outputs)


@functools.lru_cache(_CACHE_SIZE)
def _expect_numbered(
    expect_single: Callable[[str, "_Described", "_Query"], ExpectedResults],
    op: str,
    described: "_Described",
    query: "_Query",
) -> ExpectedResults:
    """Return the expected results of a request with a list of tensors x.0, x.1, ...

    Results with rows are numbered like x; gradients of weight and bias are summed over all x, and not
    numbered.

    Args:
        expect_single: `_expect_forward` or `_expect_backward`, for a request with one x.
        described: the name, dtype and shape of each tensor of the request.
        query: the request's parameters.
    """
    shared = tuple([each for each in described if each[0].partition(".")[0] not in OF_ROWS])
    outputs: dict[str, ExpectedResult] = {}
    rows = 0
    for number in range(sum(name.startswith("x.") for name, *_ in described)):
        numbered = [each for each in described if _is_numbered(each[0], number)]
        own = [(name.partition(".")[0], dtype, shape) for name, dtype, shape in numbered]
        rows += sum([shape[0] for name, _, shape in own if name == "x" and shape])
        for name, output in expect_single(op, (*own, *shared), query).by_name.items():
            if name not in PARAMETER_GRADIENTS:
                outputs[f"{name}.{number}"] = output
    # Gradients of parameters are those of all x joined along the first axis, which may be the axis of the heads.
    joined = [("x", dtype, (rows, *shape[1:])) for name, dtype, shape in described if name == "x.0"]
    of_joined = expect_single(op, (*joined, *shared), query).by_name
    return ExpectedResults(
        outputs | {name: each for name, each in of_joined.items() if name in PARAMETER_GRADIENTS}
    )


def _is_numbered(name: str, number: int) -> bool:
    base, _, digits = name.partition(".")
    return base in OF_ROWS and digits == str(number)


def _index_by_name(described: "_Described") -> dict[str, _TensorSpec]:
    return {name: _TensorSpec(dtype, shape) for name, dtype, shape in described}


def _find_dtype(name: str | None, of_x: DType) -> DType | None:
    if name is None:
        return of_x
    return next((dtype for dtype in DType if dtype.value == name), None)


def _find_parameter_size(op: str, shape: tuple[int, ...], params: Mapping[str, str]) -> int:
    """Return the length of a parameter vector; 0 where x lacks the axis, which the server refuses."""
    axis = 1 if params.get("layout", "nchw" if op == "group_norm" else "nhwc") == "nchw" else len(shape) - 1
    return shape[axis] if 0 <= axis < len(shape) else 0


def _has_samples(op: str, params: Mapping[str, str]) -> bool:
    """Return whether the request is for samples; else its x is rows."""
    return op == "group_norm" or params.get("layout") == "nchw"


def _expect_statistics(op: str, shape: tuple[int, ...], params: Mapping[str, str]) -> ExpectedResult:
    """Return the expected shape of mean and rstd: a value for each row, or for each position or group of a sample.

    Args: shape: x's.
    """
    if op != "group_norm":
        of_rows = (*shape[:1], *shape[2:]) if _has_samples(op, params) else shape[:-1]
        return ExpectedResult(of_rows, DType.FLOAT32)
    if (groups := params.get("num_groups", "")).isdecimal():
        return ExpectedResult((*shape[:1], int(groups)), DType.FLOAT32)
    return ExpectedResult(
        (*shape[:1], _find_parameter_size(op, shape, params)), DType.FLOAT32, has_unknown_group_count=True
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= 16 else f"{len(shape)} dimensions"
