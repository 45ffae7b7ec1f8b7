"""The tensors to which results are written: new ones, or those passed by the caller."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import TORCH_DTYPES, is_misaligned
from fusednorm.tensors.layouts import is_in_layout

Result = TypeVar("Result", Forward, Backward)


def can_hold_result(output: OutputSpec, given: Tensor, x: Tensor) -> bool:
    """Return whether a tensor of the caller has the dtype, shape, device and layout of a result."""
    return (
        given.dtype == TORCH_DTYPES[output.dtype]
        and given.shape == output.compute_shape(x)
        and given.device == x.device
        and not given.is_neg()
        and (is_in_layout(given, not x.is_contiguous()) if output.has_x_layout else given.is_contiguous())
    )


def _check_or_allocate_result(output: OutputSpec, given: Tensor | None, x: Tensor) -> Tensor:
    """Return the caller's tensor for a result after a check, or a new tensor if the caller passed none.

    Raises:
        KernelInputError: the tensor does not fit the result.
    """
    dtype, shape = TORCH_DTYPES[output.dtype], output.compute_shape(x)
    if given is None:
        if output.has_x_layout:
            return torch.empty_like(x, dtype=dtype)
        return torch.empty(shape, dtype=dtype, device=x.device)
    if not can_hold_result(output, given, x):
        contiguous, as_x = ("", ", laid out as x") if output.has_x_layout else ("contiguous ", "")
        raise KernelInputError(
            f"out.{output.name} must be {contiguous}{dtype} {list(shape)} on {x.device}{as_x}, "
            f"got {given.dtype} {list(given.shape)} with strides {list(given.stride())} on {given.device}"
        )
    return given


def prepare_result_tensors(result: type[Result], outputs: Outputs, x: Tensor, out: Result | None) -> Result:
    """Return a tensor for each result of a pass: the one that the caller passed in `out`, or a new one.

    Raises:
        KernelInputError: `out` is no named tuple of results, a tensor of `out` does not fit its result, or the call
            does not return that result.
    """
    if out is not None and not isinstance(out, result):
        name = result.__name__
        raise KernelInputError(
            f"out must be a {name} or None, got {type(out).__name__}: write {name}({result._fields[0]}=...)"
        )
    given: Sequence[Tensor | None] = out or (None,) * len(outputs)
    made: dict[int, Tensor] = {}
    found: list[Any] = []
    for name, output, place in zip(result._fields, outputs, given, strict=True):
        tensor = None
        if output is not None:
            tensor = made.get(id(output))
            if tensor is None:
                tensor = made[id(output)] = _check_or_allocate_result(output, place, x)
        if place is not None and place is not tensor:
            raise KernelInputError(f"out.{name} must be None: this call returns no tensor of its own there")
        found.append(tensor)
    return result(*found)


def describe_results(
    outputs: Outputs,
    result: Forward | Backward,
    x: Array,
    out: Forward | Backward | None,
    tensors: dict[str, Tensor],
) -> list[Any]:
    """Describe the results of a pass, one per field, and add their tensors to `tensors` by name.

    Args:
        x: the description of x.
        out: the caller's places, which may start anywhere; new tensors start at multiples of 16 bytes.
    """
    described: dict[str, Array] = {}
    for output, tensor in zip(outputs, result, strict=True):
        if output is not None and tensor is not None and output.name not in described:
            described[output.name] = output.describe(x, out is None or not is_misaligned(tensor))
            tensors[output.name] = tensor
    return [None if output is None else described[output.name] for output in outputs]
