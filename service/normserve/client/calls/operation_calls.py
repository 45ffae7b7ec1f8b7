"""Calls of operations: from a function's arguments to a request, and from its response to a result.

Arguments have the names that they have in the HTTP API: those of `_TENSORS` go into the body, the others into the
query.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from normserve.client.calls import array_conversion
from normserve.client.calls.api_call import ApiCall, describe_tensors, make_query
from normserve.client.calls.array_conversion import TensorLike
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.responses import expected_results
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.expected_results import ExpectedResults
from normserve.client.results import BackwardResult, ForwardResult
from normserve.codec.api_names import OF_ROWS, PARAMETER_GRADIENTS, PARAMETERS, SAMPLE_GRADIENTS
from normserve.memory.tensors import HostTensor

Tensors = TensorLike | Sequence[TensorLike]
"""A tensor, or a list with one tensor for each of several x."""

T = TypeVar("T", bound=Tensors)

_TENSORS = OF_ROWS.union(PARAMETERS)
_NO_GRADIENTS = dict.fromkeys((*PARAMETER_GRADIENTS, *SAMPLE_GRADIENTS))


def make_forward_call(op: str, x: T, arguments: Mapping[str, object]) -> ApiCall[ForwardResult[T]]:
    """Build the call of an operation's forward pass, with the function that checks and converts its response.

    Results have x's kind of array and device; `arguments` are all arguments of the public function, by name.
    """
    tensors, params = _split_arguments(arguments)
    like = get_first_tensor(x)
    sent = describe_tensors(tensors)
    if "out_dtype" in params:
        params["out_dtype"] = array_conversion.name_dtype(params["out_dtype"])
        array_conversion.check_dtype_support(like, str(params["out_dtype"]))
    query = make_query(params)
    expected = expected_results.expect_forward(op, sent, query)

    def read_result(answer: ApiResponse) -> ForwardResult[T]:
        found = _group_numbered(
            {
                name: array_conversion.convert_tensor(tensor, like)
                for name, tensor in _read_checked_tensors(answer, expected).items()
            }
        )
        statistics = found.get("mean"), found.get("rstd")
        return ForwardResult(
            found["y"], found.get("residual_out"), *statistics, answer.read_timing(), found.get("scale")
        )

    return ApiCall("POST", f"/v1/{op}", read_result, query, sent, expected.by_name, max_bytes=expected.max_bytes)


def make_backward_call(op: str, x: T, arguments: Mapping[str, object]) -> ApiCall[BackwardResult[T]]:
    """Build the call of an operation's backward pass, with the function that checks and converts its response.

    Gradients of a registered layer's parameters have x's kind of array and device.
    """
    tensors, params = _split_arguments(arguments)
    like = get_first_tensor(x)
    sent, query = describe_tensors(tensors), make_query(params)
    expected = expected_results.expect_backward(op, sent, query)

    def read_result(answer: ApiResponse) -> BackwardResult[T]:
        results = _read_checked_tensors(answer, expected)
        try:
            found = _group_numbered(
                {
                    name: array_conversion.convert_tensor(tensor, _find_gradient_source(name, like, tensors))
                    for name, tensor in results.items()
                }
            )
        # A registered layer's parameters may be of a type that x's kind of array does not have.
        except TypeError as error:
            raise UnexpectedAnswerError(str(error)) from None
        return BackwardResult(**_NO_GRADIENTS | found, timing=answer.read_timing())

    return ApiCall(
        "POST", f"/v1/{op}/backward", read_result, query, sent, expected.by_name, max_bytes=expected.max_bytes
    )


def get_first_tensor(x: T) -> Any:
    """Return x, or the first tensor where x is a list of several.

    Raises:
        TypeError: x is None, or a list that has None or no tensors.
    """
    tensors = x if isinstance(x, list | tuple) else (x,)
    if not tensors or any(each is None for each in tensors):
        given = "None in a list" if x else x
        raise TypeError(f"x must be an array or a list of at least one array, got {given}")
    return tensors[0]


def _group_numbered(results: Mapping[str, Any]) -> dict[str, Any]:
    """Collect numbered results, such as y.0 and y.1, in a list under their common name, y."""
    found: dict[str, Any] = {}
    for name, tensor in results.items():
        base, dot, _ = name.partition(".")
        if dot:
            found.setdefault(base, []).append(tensor)
        else:
            found[name] = tensor
    return found


def _split_arguments(arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Divide arguments into tensors for the body, lists as x.0 and x.1, and parameters for the query; omit None."""
    tensors: dict[str, object] = {}
    params: dict[str, object] = {}
    for name, value in arguments.items():
        if value is not None:
            if isinstance(value, list | tuple):
                tensors |= {f"{name}.{number}": each for number, each in enumerate(value)}
            else:
                (tensors if name.partition(".")[0] in _TENSORS else params)[name] = value
    return tensors, params


def _read_checked_tensors(answer: ApiResponse, expected: ExpectedResults) -> Mapping[str, HostTensor]:
    results = answer.read_tensors()
    expected.check(results)
    return results


def _find_gradient_source(gradient: str, x: object, tensors: Mapping[str, object]) -> object:
    """Return the argument that a gradient belongs to; x for a parameter of a registered layer."""
    owner = tensors.get(gradient.removeprefix("d"))
    return x if owner is None else owner
