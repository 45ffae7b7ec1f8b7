"""Several tensors in one call over shared memory: concatenated along the first axis, and the results divided.

Over HTTP they are sent separately, numbered, and the server concatenates them.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from normserve.client.calls.array_conversion import is_foreign_array
from normserve.client.calls.foreign_arrays import make_foreign_array, view_foreign_array
from normserve.client.calls.operation_calls import get_first_tensor
from normserve.codec.api_names import OF_ROWS, OF_SAMPLES, PARAMETER_GRADIENTS
from normserve.memory.tensors import HostTensor

R = TypeVar("R")

_signature = functools.cache(inspect.signature)

SEVERAL = (list, tuple)
"""The types of an operation's first argument where that is several tensors."""


class ConcatenationPlan(NamedTuple):
    """The tensors of one argument that are to be concatenated, and the shape, dtype and device of the result.

    Attributes:
        parts: the tensors to concatenate.
        device: the device of the buffer; None is host memory.
    """

    parts: Sequence[Any]
    shape: tuple[int, ...]
    dtype: Any
    device: Any

    def concatenate_into(self, memory: Any) -> Any:
        """Concatenate the tensors into a buffer that has the plan's shape and dtype, and return the buffer."""
        if isinstance(memory, np.ndarray):
            return np.concatenate(self.parts, out=memory)
        torch: Any = sys.modules["torch"]
        return torch.cat([part.detach() for part in self.parts], out=memory)


def get_first_argument(arguments: Sequence[object], named: Mapping[str, object]) -> object:
    """Return an operation's first tensor, or its list of tensors; None where there is none."""
    return arguments[0] if arguments else named.get("x")


class TensorListCall:
    """A call on lists of tensors, which is converted to one call on the concatenated tensors."""

    def __init__(self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Args: build: the operation that the arguments belong to.

        Raises:
            TypeError: they are not the operation's, or one is no array.
            ValueError: tensors cannot be joined.
        """
        self._arguments = dict(_signature(build).bind(*arguments, **named).arguments)
        get_first_tensor(self._arguments["x"])
        if type(self._arguments["x"]) not in SEVERAL:
            raise ValueError("x must be a list of tensors, as dy is")
        # The first array of each list that has arrays of another library.
        self._foreign: dict[str, object] = {}
        for name in OF_ROWS & self._arguments.keys():
            parts = self._arguments[name]
            if type(parts) in SEVERAL and any(isinstance(part, HostTensor) for part in parts):
                raise TypeError(f"{name} must be a list of arrays over shared memory, got a HostTensor in it")
            if type(parts) in SEVERAL and any(map(is_foreign_array, parts)):
                if is_foreign_array(parts[0]):
                    self._foreign[name] = parts[0]
                self._arguments[name] = [
                    view_foreign_array(f"{name}.{number}", part) if is_foreign_array(part) else part
                    for number, part in enumerate(parts)
                ]
        self._row_counts = [part.shape[0] if part.ndim > 1 else 0 for part in self._arguments["x"]]

    def iterate_plans(self) -> Iterator[tuple[str, ConcatenationPlan]]:
        """Yield the name of each argument that is a list of tensors, and the plan for its concatenation.

        The lists are checked on the way: they must be as long as x, with tensors that fit those of x.

        Raises:
            ValueError: tensors cannot be joined.
        """
        # The shapes of the others are described by x, whose own faults are therefore reported first.
        for name in sorted(OF_ROWS & self._arguments.keys(), key=lambda each: (each != "x", each)):
            parts = self._arguments[name]
            if parts is None:
                continue
            if type(parts) not in SEVERAL or len(parts) != len(self._row_counts) or not parts:
                received = len(parts) if type(parts) in SEVERAL else type(parts).__name__
                raise ValueError(
                    f"{name} must be a list of as many tensors as x, {len(self._row_counts)}, got {received}"
                )
            first = parts[0]
            for number, (part, count) in enumerate(zip(parts, self._row_counts, strict=True)):
                if isinstance(part, np.ndarray) != isinstance(first, np.ndarray):
                    kinds = f"{type(first).__name__} and {type(part).__name__}"
                    raise ValueError(
                        f"{name} must have torch tensors alone or none over shared memory, got {kinds}"
                    )
                if part.ndim < 2 and name in ("x", *OF_SAMPLES):
                    raise ValueError(
                        f"{name}.{number} must have at least two axes, the first of rows or samples, "
                        f"got {list(part.shape)}"
                    )
                shape = (count, *first.shape[1:])
                if tuple(part.shape) != shape:
                    raise ValueError(f"{name}.{number} must be {list(shape)}, got {list(part.shape)}")
                if part.dtype != first.dtype:
                    raise ValueError(f"{name}.{number} must be {first.dtype} as {name}.0 is, got {part.dtype}")
            device = first.device if getattr(first, "is_cuda", False) else None
            yield name, ConcatenationPlan(parts, (sum(self._row_counts), *first.shape[1:]), first.dtype, device)

    def make_arguments(self, joined: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call with one tensor, all by name."""
        return self._arguments | dict(joined)

    def split_result(self, result: R) -> R:
        """Split each concatenated tensor of a result into a list of views, one for each tensor in the list x.

        Views are arrays of the library of the tensors that they belong to.  The timing and the gradients of weight
        and bias, which all tensors share, stay as they are.
        """
        ends = list(accumulate(self._row_counts, initial=0))
        untyped_result: Any = result
        lists = {
            field.name: [self._convert_view(field.name, value[start:stop]) for start, stop in pairwise(ends)]
            for field in dataclasses.fields(untyped_result)
            if field.name not in (*PARAMETER_GRADIENTS, "timing")
            and (value := getattr(untyped_result, field.name)) is not None
        }
        divided: R = dataclasses.replace(untyped_result, **lists)
        return divided

    def _convert_view(self, name: str, view: Any) -> Any:
        """Convert a result to the library of x; a gradient to that of the argument that it belongs to."""
        owner = name.removeprefix("d") if name.startswith("d") else "x"
        like = self._foreign.get(owner)
        return view if like is None else make_foreign_array(view, like)
