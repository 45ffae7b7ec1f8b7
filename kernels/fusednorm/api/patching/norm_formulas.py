"""The norms that this library's functions compute, with which a module's results are compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from fusednorm.api.autograd import group_norm, layer_norm, rms_norm
from fusednorm.api.patching.activation_modules import NO_ACTIVATION, ActivationOptions

_FREE_SIZES = (3, 2, 2, 2)
"""The sizes of the axes of x that are not normalised: the number of samples, which differ in scale, comes first."""


@dataclass(frozen=True)
class NormFormula:
    """A norm as one of this library's functions computes it from a module's parameters.

    Attributes:
        operation: layer_norm, rms_norm or group_norm.
        weight_name, bias_name: the names of the module's parameters; None without such a parameter.
        weight_offset: 0, or 1 for a weight that is stored around zero.
        activation: the activation after the norm; by default there is none.
        num_groups: the number of groups of a group_norm.
        layout: nchw for a norm of rows over the channels, dim 1 of x; None (default) for one over the last axis.
    """

    operation: str
    weight_name: str | None
    bias_name: str | None
    weight_offset: float = 0.0
    activation: ActivationOptions = NO_ACTIVATION
    num_groups: int = 0
    layout: str | None = None

    def __str__(self) -> str:
        activation = "" if self.activation == NO_ACTIVATION else f" with {self.activation}"
        offset = f", weight_offset={self.weight_offset:.0f}" if self.weight_offset else ""
        layout = f", layout={self.layout}" if self.layout is not None else ""
        return f"{self.operation}{activation}{offset}{layout}"

    @property
    def can_fuse_activation(self) -> bool:
        """Whether `compute` also takes an activation, which follows the norm."""
        return self.activation == NO_ACTIVATION

    @property
    def can_modulate(self) -> bool:
        """Whether `compute` also takes scale and shift, which follow the norm.

        An RMSNorm with a bias does not, because `rms_norm` takes it as the shift.
        """
        return self.can_fuse_activation and not (self.operation == "rms_norm" and self.bias_name is not None)

    def compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **options: Any) -> Tensor:
        """Compute y by this library's function; `options` are further arguments of the function.

        weight and bias may have further axes of size 1, as [C, 1, 1].

        Raises:
            KernelInputError: the function does not support the call.
        """
        weight, bias = (each.flatten() if each is not None and each.dim() > 2 else each for each in (weight, bias))
        if self.activation != NO_ACTIVATION:
            options.update(self.activation._asdict())
        if self.operation == "group_norm":
            return group_norm(x, self.num_groups, weight, bias, eps, **options)
        options.update(weight_offset=self.weight_offset, layout=self.layout)
        if self.operation == "layer_norm":
            return layer_norm(x, weight, bias, eps, **options)
        if bias is not None:
            # Over the channels, shift must be [N, C].
            options["shift"] = bias if self.layout is None else bias.expand(x.shape[0], -1)
        return rms_norm(x, weight, eps, **options)

    def make_sample_shape(
        self, rank: int, size: tuple[int, ...], free_sizes: tuple[int, ...] = _FREE_SIZES
    ) -> tuple[int, ...] | None:
        """Return a shape of x with `rank` axes for parameters of shape `size`; None if there is none.

        The axes that are not normalised have the first of `free_sizes`, in their order.
        """
        free = free_sizes[: rank - len(size)]
        if self.operation == "group_norm" or self.layout == "nchw":
            return (free[0], *size, *free[1:]) if rank > 2 and len(size) == 1 else None
        return (*free, *size) if rank > len(size) else None


def iterate_row_formulas(
    weight_name: str | None, bias_name: str | None, activation: ActivationOptions
) -> Iterator[NormFormula]:
    """Yield the formulas of norms over the last axis, then over dim 1, for a module with these parameters."""
    offsets = (0.0, 1.0) if weight_name is not None else (0.0,)
    for layout, operation, offset in product((None, "nchw"), ("rms_norm", "layer_norm"), offsets):
        yield NormFormula(operation, weight_name, bias_name, offset, activation, layout=layout)
