"""A norm of JAX arrays that reverse-mode differentiation differentiates by the library's backward pass."""

from functools import partial
from typing import Any, NamedTuple

import jax

from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import NormOptions
from fusednorm.jax.passes import SEED, BackwardPass, ForwardPass
from fusednorm.jax.primitive import run_pass


class NormCall(NamedTuple):
    """The static arguments of a call: its options but the seed, and whether x is channels-last (see `NormPass`)."""

    options: NormOptions
    channels_last: bool


def _select_given(inputs: NormInputs[Any] | BackwardInputs[Any], seed: jax.Array | None) -> dict[str, Any]:
    named = {**inputs._asdict(), SEED: seed}
    return {name: array for name, array in named.items() if array is not None}


def _run_forward(
    call: NormCall, inputs: NormInputs[jax.Array], seed: jax.Array | None, stats: bool
) -> dict[str, jax.Array]:
    given = _select_given(inputs, seed)
    return run_pass(ForwardPass(*call, tuple(given), stats), given)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def compute_norm(
    call: NormCall, inputs: NormInputs[jax.Array], seed: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute y, and the sum residual_out if there is a residual, else None; `seed` is that of dropout (`SEED`)."""
    results = _run_forward(call, inputs, seed, stats=False)
    return results["y"], results.get("residual_out")


def _compute_and_save(call: NormCall, inputs: NormInputs[jax.Array], seed: jax.Array | None) -> tuple[Any, Any]:
    results = _run_forward(call, inputs, seed, stats=True)
    return (results["y"], results.get("residual_out")), (inputs, seed, results.get("mean"), results["rstd"])


def _compute_gradients(call: NormCall, saved: Any, gradients: Any) -> tuple[Any, None]:
    inputs, seed, mean, rstd = saved
    dy, dresidual_out = gradients
    given = _select_given(BackwardInputs._make((*inputs, mean, rstd, dy, dresidual_out)), seed)
    results = run_pass(BackwardPass(*call, tuple(given), parameter_gradients=True), given)
    made: NormInputs[Any] = NormInputs._make(results.get(f"d{name}") for name in inputs._fields)
    if inputs.residual is not None:
        dresidual = results["dx"] if made.residual is None else made.residual
        made = made._replace(residual=dresidual.astype(inputs.residual.dtype))
    return made, None


compute_norm.defvjp(_compute_and_save, _compute_gradients)
