"""Forward and backward passes of calls of JAX arrays: their checks, and shape and dtype of their results.

Everything here is also known where neither Triton nor a GPU is there; `kernel_plans` has the launches of a pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from fusednorm.arguments.arrays import Array, contiguous_strides, has_dense_strides
from fusednorm.arguments.inputs import ROLES, BackwardInputs, NormInputs, ShapeRole
from fusednorm.arguments.options import NormOptions
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.devices.device_properties import H200, GpuModel
from fusednorm.ops.group_norm import outputs as group_outputs
from fusednorm.ops.group_norm.checks import check_sample
from fusednorm.ops.layer_norm import outputs as row_outputs
from fusednorm.ops.layer_norm.checks import check_layout_and_rows

SUMS = ("dweight", "dbias")
"""The results that are sums over all rows or samples of a call."""

SEED = "seed"
"""The name of the input that is dropout's seed: the low and the high word of an int64, uint32 [2]."""

ABSENT_GPU = H200._replace(has_launch_options=False)
"""The GPU for which programs are lowered where none is there."""


@dataclass(frozen=True, slots=True)
class NormPass(ABC):
    """One pass of an operation, with everything that is not an array; hashable, as a parameter of a primitive.

    Attributes:
        options: the checked options.
        channels_last: whether arrays of x's shape are [N, *spatial, C] and not [N, C, *spatial]; of GroupNorm.
        names: the names of the inputs that are not None, in their order; with dropout `SEED` is the last.
    """

    options: NormOptions
    channels_last: bool
    names: tuple[str, ...]

    @property
    def is_of_groups(self) -> bool:
        """Whether the operation is GroupNorm."""
        return self.options.op == "group_norm"

    @property
    def has_samples_first(self) -> bool:
        """Whether the first axis of x is that of samples [N, C], not any axis of rows."""
        return self.is_of_groups or self.options.layout is not None

    def describe(self, shapes: Mapping[str, Any], device: GpuModel = ABSENT_GPU) -> dict[str, Array | None]:
        """Describe the inputs, given by name as anything with a shape and a dtype, for checks and plans."""
        return {name: self._describe_input(name, given, device) for name, given in shapes.items()}

    def _describe_input(self, name: str, given: Any, device: GpuModel) -> Array | None:
        if given is None:
            return None
        if name == SEED:
            # Kernels read both words as one number.
            return Array(SEED, "int64", (1,), (1,), device)
        shape = tuple(given.shape)
        strides = contiguous_strides(shape)
        is_dense = True
        if self.channels_last and ROLES[name] is ShapeRole.LIKE_X and len(shape) > 2:
            shape, strides = ((sizes[0], sizes[-1], *sizes[1:-1]) for sizes in (shape, strides))
            is_dense = has_dense_strides(shape, strides)
        return Array(name, str(given.dtype), shape, strides, device, is_dense)

    @abstractmethod
    def declare_outputs(self, arrays: Any) -> Outputs:
        """Check the inputs, and declare the results by field, None for none.

        Args:
            arrays: the described inputs, `NormInputs` or `BackwardInputs`.

        Raises:
            KernelInputError: a wrong shape, dtype or value.
        """

    @abstractmethod
    def make_inputs(self, given: Mapping[str, Any]) -> Any:
        """Make `NormInputs` or `BackwardInputs` of inputs by name; those that are not given are None."""

    @abstractmethod
    def leave_out(self, names: Collection[str]) -> Self:
        """Return the pass without those of these results that it may leave out, all of a kind."""

    def list_results(self, shapes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Check the inputs, and list shape and dtype of each result by its name, in the order of the fields."""
        arrays = self.make_inputs(self.describe(shapes))
        x, found = arrays.x, {}
        for spec in self.declare_outputs(arrays):
            if spec is not None:
                shape = shapes["x"].shape if _has_shape_of_x(spec) else spec.compute_shape(x)
                found[spec.name] = jax.ShapeDtypeStruct(shape, np.dtype(spec.dtype))
        return found


def _has_shape_of_x(spec: OutputSpec) -> bool:
    return spec.shape is None and not spec.dropped_axes


@dataclass(frozen=True, slots=True)
class ForwardPass(NormPass):
    """A forward pass; `stats` is whether mean and rstd are results."""

    stats: bool

    def leave_out(self, names: Collection[str]) -> Self:
        has_rstd_alone = self.options.is_rms and "rstd" in names
        return replace(self, stats=False) if has_rstd_alone or {"mean", "rstd"} <= set(names) else self

    def declare_outputs(self, arrays: NormInputs[Array]) -> Outputs:
        x = arrays.x
        if self.is_of_groups:
            sample = check_sample(self.options, arrays)
            return group_outputs.declare_forward_outputs(x, sample, arrays.residual, x.dtype, self.stats)
        check_layout_and_rows(self.options, arrays)
        positions_shape = None if self.options.layout is None else (x.shape[0], *x.shape[2:])
        return row_outputs.declare_forward_outputs(
            arrays.residual, x.dtype, self.stats, self.options.is_rms, positions_shape
        )

    def make_inputs(self, given: Mapping[str, Any]) -> NormInputs[Any]:
        return NormInputs._make(map(given.get, NormInputs._fields))


@dataclass(frozen=True, slots=True)
class BackwardPass(NormPass):
    """A backward pass; `parameter_gradients` is whether dweight and dbias are results."""

    parameter_gradients: bool

    def leave_out(self, names: Collection[str]) -> Self:
        wanted = {f"d{name}" for name in ("weight", "bias") if name in self.names} - set(names)
        return self if wanted else replace(self, parameter_gradients=False)

    def declare_outputs(self, arrays: BackwardInputs[Array]) -> Outputs:
        if self.is_of_groups:
            check_sample(self.options, arrays)
            parameters = (arrays.weight, arrays.bias) if self.parameter_gradients else (None, None)
            return group_outputs.declare_backward_outputs(
                arrays.x, (*parameters, arrays.scale, arrays.shift), arrays.residual is not None
            )
        check_layout_and_rows(self.options, arrays)
        return row_outputs.declare_backward_outputs(
            arrays.forward_inputs, self.parameter_gradients, self.options.layout is not None
        )

    def make_inputs(self, given: Mapping[str, Any]) -> BackwardInputs[Any]:
        return BackwardInputs._make(map(given.get, BackwardInputs._fields))
