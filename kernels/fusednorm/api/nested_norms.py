"""Norms of jagged nested tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.inputs import NormInputs
from fusednorm.arguments.options import NormOptions
from fusednorm.errors import KernelInputError


def compute_nested_norm(
    compute_norm: Callable[..., tuple[Tensor, Any]], options: NormOptions, inputs: NormInputs
) -> tuple[Tensor, Any]:
    """Compute a norm of a nested x as a norm of the one tensor that holds all its values; return y and the sum.

    The results are nested again, with x's offsets.  `compute_norm` computes it of tensors that are not nested.

    Raises:
        KernelInputError: x is not jagged with rows of one length, the operation is a group norm, or the
            residual is not a nested tensor of x's shape; or there is a scale, shift or gate.
    """
    x: Any = inputs.x
    residual: Any = inputs.residual
    over_rows = options.op != "group_norm" and options.layout is None
    if not over_rows or x.layout is not torch.jagged or x._ragged_idx == x.dim() - 1:
        raise KernelInputError(
            "a nested x must have the layout torch.jagged, rows of one length, and layer_norm or rms_norm over "
            f"them, got {options.op} of a nested tensor with layout {x.layout}: call the function with each tensor "
            "of x.unbind()"
        )
    if not inputs.scale is inputs.shift is inputs.gate is None:
        raise KernelInputError("scale, shift and gate need an x that is not nested: its samples have other lengths")
    if residual is not None and not (residual.is_nested and residual.shape == x.shape):
        raise KernelInputError("residual must be a nested tensor with x's offsets, as x is nested, got another one")

    def wrap_values(values: Tensor | None) -> Any:
        if values is None:
            return None
        return torch.nested.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x._ragged_idx)

    of_values = inputs._replace(x=x.values(), residual=None if residual is None else residual.values())
    y, residual_out = compute_norm(options, *of_values)
    return wrap_values(y), wrap_values(residual_out)
