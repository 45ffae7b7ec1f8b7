"""Calls of the public functions: the checks of their arguments, and what no pass has to do."""

from functools import partial
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
from fusednorm.jax.shardings import gather, reshard, vary_alike

LAYOUTS = ("nchw", "nhwc")

_WORD = 0xFFFFFFFF

_compute_norm = jax.jit(compute_norm, static_argnums=0, inline=True)


def dispatch_norm(
    options: NormOptions, inputs: NormInputs[Any], seed: int | jax.Array | None, group_layout: str = "nchw"
) -> tuple[jax.Array, jax.Array | None]:
    """Compute a norm, after the addition of a residual if there is one; return y and the sum, or None.

    Args:
        options: all but the seed, not checked yet.
        inputs: anything that callers passed.
        seed: that of dropout, not checked yet.
        group_layout: the layout of GroupNorm's arrays of x's shape.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
        TypeError: an input is no array.
    """
    if group_layout not in LAYOUTS:
        raise KernelInputError(f'layout must be "nchw" or "nhwc", got {group_layout!r}')
    arrays: NormInputs[Any] = NormInputs._make(_convert_array(*each) for each in inputs._asdict().items())
    _check_no_arrays(options)
    options = NormOptions._make(map(_convert_int, options._replace(seed=_get_number(seed)))).validate()
    # The seed differs between calls, which have one compiled program.
    call = NormCall(options._replace(seed=None), group_layout == "nhwc")
    if arrays.x.size == 0:
        return _return_empty(call, arrays)
    words = _split_into_words(seed) if options.dropout else None
    results = _compute_norm(call, *vary_alike(jax.tree.map(gather, (arrays, words))))
    sharding = jax.typeof(arrays.x).sharding
    y, residual_out = (None if each is None else reshard(each, sharding) for each in results)
    return y, residual_out


def _convert_array(name: str, given: Any) -> jax.Array | None:
    if given is None and name != "x":
        return None
    if not isinstance(given, jax.Array | np.ndarray):
        expected = f"{name} must be an array of JAX or numpy"
        if name == "weight" and is_shape(given):
            raise TypeError(f"{expected}, got {given}: there is no normalized_shape before weight")
        raise TypeError(f"{expected}, got {type(given).__name__}: write jnp.asarray({name})")
    try:
        return jnp.asarray(given)
    except TypeError:
        raise KernelInputError(f"{name} must be float32, float16 or bfloat16, got {given.dtype}") from None


def _check_no_arrays(options: NormOptions) -> None:
    """Raise KernelInputError if an option is an array, or stands for one while JAX traces."""
    for name, value in options._asdict().items():
        if isinstance(value, jax.core.Tracer):
            raise KernelInputError(
                f"{name} must be a Python value, got a traced {_name_type(value)}: under jax.jit bind it by "
                "functools.partial or name it in static_argnames"
            )
        if isinstance(value, jax.Array | np.ndarray):
            raise KernelInputError(f"{name} must be a Python value, got an array {_name_type(value)}")


def _name_type(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _convert_int(value: Any) -> Any:
    """Convert an int of JAX's subclass, of which `jax.vjp` makes an argument that it does not differentiate."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _get_number(seed: Any) -> Any:
    """Return a seed as a number to check; that of an array of JAX, which may be traced, is 0.

    Raises:
        KernelInputError: an array that is no integer.
    """
    if not isinstance(seed, jax.Array | np.ndarray | np.generic):
        return seed
    if seed.shape or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise KernelInputError(
            f"seed must be an int or an array of integers of shape (), got {_name_type(seed)}: "
            "a key of jax.random gives one by jax.random.bits(key)"
        )
    return 0 if isinstance(seed, jax.Array) else int(seed.astype(np.int64))


def _split_into_words(seed: Any) -> jax.Array:
    """Split a seed, an integer of any width, into the words of an int64 of the same value (see `passes.SEED`)."""
    if isinstance(seed, jax.Array):
        return _split_array_into_words(seed)
    return jnp.asarray(np.array([int(seed) & _WORD, int(seed) >> 32 & _WORD], np.uint32))


@partial(jax.jit, inline=True)
def _split_array_into_words(seed: jax.Array) -> jax.Array:
    if seed.dtype.itemsize == 8:
        return lax.bitcast_convert_type(seed, jnp.uint32)
    if jnp.issubdtype(seed.dtype, jnp.unsignedinteger):
        return jnp.stack([seed.astype(jnp.uint32), jnp.uint32(0)])
    low = seed.astype(jnp.int32)
    return lax.bitcast_convert_type(jnp.stack([low, low >> 31]), jnp.uint32)


def _return_empty(call: NormCall, arrays: NormInputs[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Return the results of a call without elements, which no kernel computes; all gradients are zero."""
    given = {name: array for name, array in arrays._asdict().items() if array is not None}
    results = ForwardPass(*call, tuple(given), stats=False).list_results(given)
    sums = results.get("residual_out")
    return arrays.x, None if sums is None else jnp.zeros(sums.shape, sums.dtype)
