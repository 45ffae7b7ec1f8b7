"""The launches of a pass, planned by the library's tables, and their execution inside a JAX trace."""

from dataclasses import replace
from typing import Any

import jax

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.outputs import Outputs
from fusednorm.devices.device_properties import GpuModel
from fusednorm.errors import UnsupportedShapeError
from fusednorm.jax.passes import ABSENT_GPU, SEED, ForwardPass, NormPass
from fusednorm.jax.triton_calls import PlanBuffers, run_launches
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm import backward_choice as group_backward
from fusednorm.ops.group_norm import forward_choice as group_forward
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.checks import check_sample
from fusednorm.ops.layer_norm import choices as row_choices
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.checks import check_layout_and_rows
from fusednorm.results import Backward, Forward


def run_by_kernels(norm_pass: NormPass, inputs: dict[str, jax.Array]) -> list[jax.Array]:
    """Compute a pass by kernels, and return its results in the order of `NormPass.list_results`.

    Raises:
        UnsupportedShapeError: no kernel takes these shapes, or they have sizes that are not known.
    """
    shape = inputs["x"].shape
    if any(map(jax.export.is_symbolic_dim, shape)):
        raise UnsupportedShapeError(
            f"x [{', '.join(map(str, shape))}] needs sizes that are numbers on a GPU, where kernels are chosen by "
            "them: export the function once for each shape"
        )
    device = describe_gpu()
    buffers = PlanBuffers(inputs, norm_pass.list_results(inputs))
    run_launches(plan_launches(norm_pass, inputs, device), buffers, device.arch)
    return buffers.list_results()


def describe_gpu() -> GpuModel:
    """Describe JAX's first GPU; or, if there is none, the one for which programs are lowered in advance."""
    try:
        gpu, *_ = jax.devices("cuda")
    except RuntimeError:
        return ABSENT_GPU
    major, minor = map(int, gpu.compute_capability.split("."))
    return GpuModel(gpu.device_kind, (major, minor), gpu.core_count, has_launch_options=False)


def plan_launches(norm_pass: NormPass, shapes: dict[str, jax.Array], device: GpuModel) -> list[Launch]:
    """Plan the launches of a pass for inputs by name, anything with a shape and a dtype, on a device."""
    described = norm_pass.describe(shapes, device)
    arrays = norm_pass.make_inputs(described)
    results = _describe_results(norm_pass.declare_outputs(arrays), arrays.x)
    plan = _plan_group_norm if norm_pass.is_of_groups else _plan_row_norm
    launches, seed = plan(norm_pass, arrays, results), described.get(SEED)
    return launches if seed is None else [_replace_seed(launch, seed) for launch in launches]


def _replace_seed(launch: Launch, seed: Array) -> Launch:
    """Let a kernel that has dropout's seed as a number read it from an array."""
    named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
    return replace(launch, arguments=tuple(seed if name == "seed" else value for name, value in named))


def _describe_results(outputs: Outputs, x: Array) -> list[Any]:
    # One array for fields with one specification: a kernel writes it once.
    described = {spec.name: spec.describe(x) for spec in outputs if spec is not None}
    return [None if spec is None else described[spec.name] for spec in outputs]


def _plan_row_norm(norm_pass: NormPass, arrays: Any, results: list[Any]) -> list[Launch]:
    options = norm_pass.options
    rows = check_layout_and_rows(options, arrays)
    if isinstance(norm_pass, ForwardPass):
        return row_choices.plan_forward(LayerNormForwardCall(**rows, options=options, out=Forward(*results)))
    return row_choices.plan_backward(LayerNormBackwardCall(**rows, options=options, out=Backward(*results)))


def _plan_group_norm(norm_pass: NormPass, arrays: Any, results: list[Any]) -> list[Launch]:
    given = {
        "x": arrays.x,
        "sample": check_sample(norm_pass.options, arrays),
        "affine": AffineParameters(arrays.weight, arrays.bias, arrays.scale, arrays.shift),
        "options": norm_pass.options,
        "residual": arrays.residual,
    }
    if isinstance(norm_pass, ForwardPass):
        return group_forward.plan_forward(GroupNormForwardCall(**given, out=Forward(*results)))
    saved = {name: getattr(arrays, name) for name in ("dy", "mean", "rstd", "dresidual_out")}
    return group_backward.plan_backward(GroupNormBackwardCall(**given, **saved, out=Backward(*results)))
