"""Calls of the public functions: the checks of their arguments, and what no pass has to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fusednorm.arguments.checks import is_shape
from fusednorm.arguments.inputs import NormInputs
from fusednorm.arguments.options import NormOptions
from fusednorm.errors import KernelInputError
from fusednorm.jax.differentiable import NormCall, compute_norm
from fusednorm.jax.passes import ForwardPass

LAYOUTS = ("nchw", "nhwc")

_compute_norm = jax.jit(compute_norm, static_argnums=0, inline=True)


def dispatch_norm(
    options: NormOptions, inputs: NormInputs[Any], group_layout: str = "nchw"
) -> tuple[jax.Array, jax.Array | None]:
    """Compute a norm, after the addition of a residual if there is one; return y and the sum, or None.

    Args:
        options: not checked yet.
        inputs: anything that callers passed.
        group_layout: the layout of GroupNorm's arrays of x's shape.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
        TypeError: an input is no array.
    """
    if group_layout not in LAYOUTS:
        raise KernelInputError(f'layout must be "nchw" or "nhwc", got {group_layout!r}')
    arrays: NormInputs[Any] = NormInputs._make(_convert_array(*each) for each in inputs._asdict().items())
    _check_no_arrays(options)
    call = NormCall(options.validate(), group_layout == "nhwc")
    if arrays.x.size == 0:
        return _return_empty(call, arrays)
    results = _compute_norm(call, _vary_alike(NormInputs._make(map(_gather, arrays))))
    y, residual_out = (_shard_as(each, arrays.x) for each in results)
    return y, residual_out


def _convert_array(name: str, given: Any) -> jax.Array | None:
    if given is None and name != "x":
        return None
    if not isinstance(given, jax.Array | np.ndarray):
        expected = f"{name} must be an array of JAX or numpy"
        if name == "weight" and is_shape(given):
            raise TypeError(f"{expected}, got {given}: there is no normalized_shape before weight")
        raise TypeError(f"{expected}, got {type(given).__name__}: write jnp.asarray({name})")
    return jnp.asarray(given)


def _check_no_arrays(options: NormOptions) -> None:
    """Raise KernelInputError if an option is an array, or stands for one while JAX traces."""
    for name, value in options._asdict().items():
        if isinstance(value, jax.Array | np.ndarray):
            raise KernelInputError(
                f"{name} must be a Python value, got {value!r}: under jax.jit bind it by functools.partial or "
                "name it in static_argnames"
            )


def _gather(array: jax.Array | None) -> jax.Array | None:
    """Gather an array that is sharded over explicit axes of a mesh, as a pass needs; its gradient is sharded."""
    if array is None or not any(jax.typeof(array).sharding.spec):
        return array
    return jax.sharding.reshard(array, jax.typeof(array).sharding.update(spec=jax.P()))


def _shard_as(result: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """Shard a result of x's shape over explicit axes of a mesh as x."""
    sharding = jax.typeof(x).sharding
    return result if result is None or not any(sharding.spec) else jax.sharding.reshard(result, sharding)


def _vary_alike(arrays: NormInputs[jax.Array]) -> NormInputs[jax.Array]:
    """Make arrays of a `shard_map` vary over the same axes of its mesh, as passes need.

    The gradient of an array that varied over fewer axes is then the sum over the others.
    """
    varying = [frozenset() if each is None else jax.typeof(each).manual_axis_type.varying for each in arrays]
    axes = frozenset().union(*varying)
    return NormInputs._make(
        each if own == axes or each is None else lax.pcast(each, tuple(axes - own), to="varying")
        for each, own in zip(arrays, varying, strict=True)
    )


def _return_empty(call: NormCall, arrays: NormInputs[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Return the results of a call without elements, which no kernel computes; all gradients are zero."""
    given = {name: array for name, array in arrays._asdict().items() if array is not None}
    results = ForwardPass(*call, tuple(given), stats=False).list_results(given)
    sums = results.get("residual_out")
    return arrays.x, None if sums is None else jnp.zeros(sums.shape, sums.dtype)
