"""The primitive of a pass, and the rules by which JAX evaluates, lowers and batches it.

A primitive of our own, rather than calls of kernels in the traced program: transformations see only this, and
choose an implementation when they lower for a platform.  On a CPU neither plans nor Triton are needed.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla

from fusednorm.arguments.inputs import ROLES, ShapeRole
from fusednorm.devices.device_properties import make_missing_triton_error
from fusednorm.jax.formulas import compute_by_formulas
from fusednorm.jax.passes import SUMS, NormPass
from fusednorm.jax.shardings import gather, get_axis_sharding, reshard

norm_pass_p = Primitive("fusednorm_pass")
norm_pass_p.multiple_results = True


def run_pass(norm_pass: NormPass, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Run a pass on JAX arrays by name, and return its results by name.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
    """
    results = norm_pass_p.bind(*map(inputs.__getitem__, norm_pass.names), norm_pass=norm_pass)
    return dict(zip(norm_pass.list_results(inputs), results, strict=True))


def _name_inputs(norm_pass: NormPass, arrays: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(norm_pass.names, arrays, strict=True))


def _evaluate(*arrays: jax.Array, norm_pass: NormPass) -> Any:
    return xla.apply_primitive(norm_pass_p, *arrays, norm_pass=norm_pass)


def _infer_results(*arrays: Any, norm_pass: NormPass) -> list[Any]:
    """Return the abstract values of the results; inputs and results vary over the same axes of a manual mesh."""
    inputs = _name_inputs(norm_pass, arrays)
    x = inputs["x"]
    results = norm_pass.list_results(inputs).values()
    made = []
    for result in results:
        sharding = x.sharding.update(spec=jax.P(*[None] * len(result.shape)))
        made.append(x.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding))
    return made


def _lower_for_cpu(*arrays: jax.Array, norm_pass: NormPass) -> list[jax.Array]:
    return list(compute_by_formulas(norm_pass, _name_inputs(norm_pass, arrays)).values())


def _lower_for_cuda(*arrays: jax.Array, norm_pass: NormPass) -> list[jax.Array]:
    inputs = _name_inputs(norm_pass, arrays)
    if inputs["x"].size == 0:
        # A batch of no calls: no kernel has a grid without programs.
        return _lower_for_cpu(*arrays, norm_pass=norm_pass)
    try:
        from fusednorm.jax.kernel_plans import run_by_kernels
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise make_missing_triton_error(f"{norm_pass.options.op} on a GPU") from None
    return run_by_kernels(norm_pass, inputs)


def _batch(arrays: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, norm_pass: NormPass) -> Any:
    """Compute a batch of calls: as one call of more rows or samples where that gives the same, else by formulas.

    It gives something else if the calls differ in a parameter, for sums over the rows of each call, and with
    dropout, whose mask depends on the number of a row.  XLA makes few kernels of a batch of formulas.

    A batch that is sharded over an explicit axis of a mesh is gathered, and its results are sharded as it was.
    """
    batched = {name: axis for name, axis in zip(norm_pass.names, axes, strict=True) if axis is not None}
    inputs = _name_inputs(norm_pass, arrays)
    names = list(
        norm_pass.list_results({name: _drop_axis(each, batched.get(name)) for name, each in inputs.items()})
    )
    sharding = next(get_axis_sharding(inputs[name], axis) for name, axis in batched.items())
    inputs |= {name: gather(jnp.moveaxis(inputs[name], axis, 0)) for name, axis in batched.items()}
    results: dict[str, jax.Array] = {}
    if not (norm_pass.options.dropout or any(ROLES[name] is ShapeRole.PARAMETER for name in batched)):
        results = _run_as_one(norm_pass.leave_out(SUMS), inputs, batched.keys())
    others = tuple(name for name in names if name not in results)
    if others:
        results |= _compute_batch_by_formulas(norm_pass, others, tuple(batched), inputs)
    return [reshard(results[name], sharding) for name in names], [0] * len(names)


def _drop_axis(array: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = tuple(size for place, size in enumerate(array.shape) if place != axis)
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _run_as_one(
    norm_pass: NormPass, inputs: dict[str, jax.Array], batched: Collection[str]
) -> dict[str, jax.Array]:
    """Run a pass of calls with the same parameters as a pass over the rows or samples of all."""
    size = next(inputs[name].shape[0] for name in batched)
    merged = {}
    for name, array in inputs.items():
        merged[name] = array
        if ROLES[name] is not ShapeRole.PARAMETER:
            each = array if name in batched else jnp.broadcast_to(array, (size, *array.shape))
            samples_first = norm_pass.has_samples_first
            merged[name] = each.reshape(size * each.shape[1], *each.shape[2:]) if samples_first else each
    results = run_pass(norm_pass, merged)
    if norm_pass.has_samples_first:
        samples = _drop_axis(inputs["x"], 0 if "x" in batched else None).shape[0]
        return {name: result.reshape(size, samples, *result.shape[1:]) for name, result in results.items()}
    return results


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compute_batch_by_formulas(
    norm_pass: NormPass, names: tuple[str, ...], batched: tuple[str, ...], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Compute some results of a batch of calls; those of `batched` inputs have it as their first axis."""

    def compute(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        results = compute_by_formulas(norm_pass, inputs)
        return {name: results[name] for name in names}

    results: dict[str, jax.Array] = jax.vmap(compute, ({name: 0 if name in batched else None for name in inputs},))(
        inputs
    )
    return results


def _refuse_second_derivatives(*_: Any, **__: Any) -> Any:
    """Raise TypeError where a gradient is differentiated; forward mode fails earlier, by `custom_vjp`."""
    raise TypeError("norms of fusednorm.jax are differentiated once, in reverse mode: no hessian, no grad of grad")


def _leave_out_unused(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Leave out of a program what it does not use: statistics, sums over rows, or a whole pass."""
    # Before the equation JAX 0.12 names the inputs that are read later; 0.11 does not.
    equation = rest[-1]
    if not any(used):
        return [False] * len(equation.invars), None
    norm_pass = equation.params["norm_pass"]
    inputs = _name_inputs(norm_pass, tuple(variable.aval for variable in equation.invars))
    results = dict(zip(norm_pass.list_results(inputs), zip(equation.outvars, used, strict=True), strict=True))
    narrow = norm_pass.leave_out({name for name, (_, is_used) in results.items() if not is_used})
    outputs = [results[name][0] for name in narrow.list_results(inputs)]
    return [True] * len(equation.invars), equation.replace(params={"norm_pass": narrow}, outvars=outputs)


norm_pass_p.def_impl(_evaluate)
norm_pass_p.def_abstract_eval(_infer_results)
partial_eval.dce_rules[norm_pass_p] = _leave_out_unused
ad.primitive_jvps[norm_pass_p] = _refuse_second_derivatives
batching.primitive_batchers[norm_pass_p] = _batch
mlir.register_lowering(norm_pass_p, mlir.lower_fun(_lower_for_cpu), platform="cpu")
mlir.register_lowering(norm_pass_p, mlir.lower_fun(_lower_for_cuda), platform="cuda")
