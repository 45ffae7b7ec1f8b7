"""The tensors that results are written to: new ones, or those passed by the caller.

Each pass declares its results once, as an `Output` for each field.  This declaration allocates and checks the
results of the first call of a kind and, in `launch.replay`, of the following calls.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusednorm.arguments.layouts import in_layout
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward

Result = TypeVar("Result", Forward, Backward)


class Output(NamedTuple):
    """One result of a pass, on x's device.

    Attributes:
        name: the field of the result.
        dtype: the tensor's dtype.
        shape: the tensor's shape; None for x's shape without its last `axes_less` axes.
        as_x: whether the tensor has x's layout, one of the two layouts of samples; else it is contiguous.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size | None = None
    axes_less: int = 0
    as_x: bool = False

    def shape_for(self, x: Tensor) -> torch.Size:
        """The tensor's shape for a call with x."""
        if self.shape is not None:
            return self.shape
        return x.shape[: x.dim() - self.axes_less]

    def fits(self, given: Tensor, x: Tensor) -> bool:
        """Whether the result can be written to the tensor `given`."""
        return (
            given.dtype == self.dtype
            and given.shape == self.shape_for(x)
            and given.device == x.device
            and not given.is_neg()
            and (in_layout(given, not x.is_contiguous()) if self.as_x else given.is_contiguous())
        )

    def place(self, given: Tensor | None, x: Tensor) -> Tensor:
        """A tensor for the result: a new one, or `given`.

        Raises:
            KernelInputError: `given` does not fit.
        """
        if given is None:
            if self.as_x:
                return torch.empty_like(x, dtype=self.dtype)
            return torch.empty(self.shape_for(x), dtype=self.dtype, device=x.device)
        if not self.fits(given, x):
            contiguous, as_x = ("", ", laid out as x") if self.as_x else ("contiguous ", "")
            raise KernelInputError(
                f"out.{self.name} must be {contiguous}{self.dtype} {list(self.shape_for(x))} on {x.device}{as_x}, "
                f"got {given.dtype} {list(given.shape)} with strides {list(given.stride())} on {given.device}"
            )
        return given


Outputs = tuple[Output | None, ...]
"""One `Output` per field of a result, or None for no tensor; fields with the same `Output` share one tensor."""


def places(result: type[Result], outputs: Outputs, x: Tensor, out: Result | None) -> Result:
    """Tensors for all results of a pass: the tensors of `out` where it has some, else new ones.

    Raises:
        KernelInputError: a tensor of `out` does not fit its result, or the call does not return that result.
    """
    given: Sequence[Tensor | None] = out or (None,) * len(outputs)
    made: dict[int, Tensor] = {}
    found: list[Any] = []
    for name, output, place in zip(result._fields, outputs, given, strict=True):
        tensor = None
        if output is not None:
            tensor = made.get(id(output))
            if tensor is None:
                tensor = made[id(output)] = output.place(place, x)
        if place is not None and place is not tensor:
            raise KernelInputError(f"out.{name} must be None: this call returns no tensor of its own there")
        found.append(tensor)
    return result(*found)
