"""What the backward passes whose programs wait for nothing, and read x and dy twice, share in both layouts."""

from collections.abc import Mapping
from typing import Any

from fusednorm.launch.launch import Launch, dependent
from fusednorm.ops.group_norm.call import BackwardCall, empty_statistics
from fusednorm.ops.group_norm.reduce_sums import group_reduction, parameter_reductions


def sums_and_apply(
    call: BackwardCall,
    kernels: tuple[Any, Any],
    grid: tuple[int, ...],
    walk: tuple[Any, ...],
    options: Mapping[str, object],
    splits: int,
) -> list[Launch]:
    """Sums of channels, their reduction to groups, dx, and the reduction to gradients of parameters."""
    sample = call.sample
    parts = call.parts(splits)
    sum_g, sum_g_xhat = empty_statistics(call.x, sample)
    sums_kernel, apply_kernel = kernels
    sums_arguments = (
        *call.inputs, call.affine_parameters, call.mean, call.rstd, *parts, *walk
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, call.affine_parameters, call.mean, call.rstd, sum_g, sum_g_xhat,
        call.out.dx, *walk,
    )  # fmt: skip
    sums_options = {
        **options,
        "DY_OTHER": call.lies_otherwise(call.dy),
        "RESIDUAL_OTHER": call.lies_otherwise(call.residual),
    }
    apply_options = {
        **sums_options,
        **dependent(call.early),
        "OUTSIDE_OTHER": call.lies_otherwise(call.dresidual_out),
    }
    return [
        Launch(sums_kernel, grid, sums_arguments, sums_options),
        group_reduction(call, parts, sum_g, sum_g_xhat, splits),
        Launch(apply_kernel, grid, apply_arguments, apply_options),
        *parameter_reductions(call, parts, splits),
    ]
