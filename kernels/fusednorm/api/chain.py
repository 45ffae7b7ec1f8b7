"""Several LayerNorms in a row in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm.checks import as_rows, check_parameter, check_tensor, checked_eps
from fusednorm.device import INTERPRETED, multiprocessor_count
from fusednorm.errors import KernelInputError
from fusednorm.integers import cdiv
from fusednorm.launch.launch import Launch, can_prefetch, run, vector_units
from fusednorm.ops.layer_norm.call import row_strides
from fusednorm.ops.layer_norm.chain import layer_norm_chain_held_kernel, layer_norm_chain_sweep_kernel
from fusednorm.ops.layer_norm.configs import ForwardSweep
from fusednorm.ops.layer_norm.float8_table import HELD_AHEAD_PER_SM, HeldRows, choose_held

MAX_NORMS = 8
"""Norms in a chain; each number of them is a kernel of its own, with that many norms in its code."""

# Rows that are not held, by bytes of an element of x: one access a thread in each chunk, which leaves registers for
# the parameters of several norms.
_SWEPT = {
    2: ForwardSweep(4096, num_warps=16, ahead_per_sm=1),
    4: ForwardSweep(2048, num_warps=16, ahead_per_sm=1),
}

Parameters = tuple[Tensor | None, ...]


def layer_norm_chain(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] | None = None,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = LN_k(... LN_2(LN_1(x))) over the last axis, LN_i(h) = (h - mean(h)) * rstd(h) * weights[i] + biases[i].

    What one norm hands to the next stays float32, so that only y is rounded to its dtype; k separate calls round k
    times.  Every norm takes its moments as `layer_norm_forward` does.  There is no backward pass.

    Args:
        x: [..., cols], float32, float16 or bfloat16, CUDA; the last axis contiguous, rows one stride apart.
        weights: 1 to 8 of [cols], any of these dtypes, or None for ones; as many as there are norms.
        biases: as many of [cols], any of these dtypes, or None for zeros; None for no biases at all.
        eps: added to each variance; positive and finite.
        out_dtype: y's dtype; x's when None.

    Returns:
        y: [..., cols] contiguous.

    Raises:
        KernelInputError: a wrong number of norms, shape, dtype, device or value; or gradients are enabled and an
            argument requires one.
        UnsupportedShapeError: strides that no kernel handles; nothing is copied to make them fit.

    Traffic: `traffic.forward_bytes`: x and y once each, however many norms.  Rows beyond 16384 columns are read
    once more from L1 or L2 for every norm.

    Source: as `layer_norm_forward`.
    """
    weights = tuple(weights)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    if not 1 <= len(weights) <= MAX_NORMS:
        raise KernelInputError(f"weights must hold 1 to {MAX_NORMS} norms, got {len(weights)}")
    if len(biases) != len(weights):
        raise KernelInputError(f"biases must be as many as weights, {len(weights)}, got {len(biases)}")
    eps = checked_eps(eps)
    check_tensor("x", x)
    x_rows = as_rows("x", x)
    rows = x_rows.shape[0]
    for name, parameters in (("weights", weights), ("biases", biases)):
        for index, parameter in enumerate(parameters):
            check_parameter(f"{name}[{index}]", parameter, x.shape[-1:], x)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights, *biases)):
        raise KernelInputError("layer_norm_chain has no derivative: call it under torch.no_grad()")

    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    check_tensor("out_dtype", y)
    if rows:
        run(x.device, plan_chain(x_rows, weights, biases, eps, y))
    return y


def plan_chain(x: Tensor, weights: Parameters, biases: Parameters, eps: float, y: Tensor) -> list[Launch]:
    """The launch of a chain over checked [rows, cols] tensors into y."""
    rows, cols = x.shape
    config = choose_held(cols) or _SWEPT[x.element_size()]
    strides = row_strides(cols, x)
    vec = vector_units(cols, *strides)
    tensors = (x, y, weights, biases)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps)
    options = {
        "NORMS": len(weights),
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "VEC": vec,
        "FAST": not INTERPRETED,
    }
    multiprocessors = multiprocessor_count(x.device)
    match config:
        case HeldRows():
            options |= {
                "ROWS": config.rows,
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n,
            }
            options["PREFETCH"] = config.rows == 1 and can_prefetch(vec, x)
            programs = cdiv(rows, config.rows)
            arguments = (*tensors, HELD_AHEAD_PER_SM * multiprocessors, rows, *sizes)
            return [Launch(layer_norm_chain_held_kernel, (programs,), arguments, options)]
        case ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": 16 // x.element_size()}
            options["PREFETCH"] = can_prefetch(vec, x)
            arguments = (*tensors, config.ahead_per_sm * multiprocessors, *sizes)
            return [Launch(layer_norm_chain_sweep_kernel, (rows,), arguments, options)]
