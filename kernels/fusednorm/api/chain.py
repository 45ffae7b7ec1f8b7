"""Several consecutive LayerNorms in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm.arguments.checks import check_float, check_out_dtype, check_parameter, validate_eps, view_as_rows
from fusednorm.arguments.inputs import ShapeRole
from fusednorm.errors import KernelInputError
from fusednorm.launch.execution import run_launches
from fusednorm.launch.replay_cache import ReplayablePass
from fusednorm.ops.layer_norm.chain import ChainCall
from fusednorm.ops.layer_norm.choices import plan_chain
from fusednorm.ops.layer_norm.outputs import declare_forward_outputs
from fusednorm.results import Forward
from fusednorm.tensors.arrays import describe_as_arrays, name_dtype
from fusednorm.tensors.outputs import describe_results, prepare_result_tensors

CHAIN = ReplayablePass(Forward, (ShapeRole.LIKE_X,))
"""Inputs x, weights and biases."""

MAX_NORMS = 8
"""The most norms in a chain; each number of norms is a separate kernel with that many norms in its code."""


def layer_norm_chain(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] | None = None,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute up to 8 consecutive LayerNorms over the last axis by one launch; autograd does not see it.

    y = LN_k(... LN_2(LN_1(x))), LN_i(h) = (h - mean(h)) / sqrt(var(h) + eps) * weights[i] + biases[i].

    Values between norms stay float32, so that only y is rounded to its dtype; k separate calls round k times.  The
    variance is computed about a pivot within the range of the row's values.

    The tensors must be CUDA tensors.  `fusednorm.reference.chain.layer_norm_chain` computes this on the CPU, with
    these arguments except `out`.

    Args:
        x: [..., cols], float32, float16 or bfloat16; the last axis contiguous, rows one stride apart.
        weights: one per norm, 1 to 8: [cols], any of these dtypes, or None for ones.
        biases: one per norm: [cols], any of these dtypes, or None for zeros; None (default) for no biases at all.
        eps: added to each variance; at least 0 and finite; default 1e-5.
        out_dtype: y's dtype: float32, float16 or bfloat16; None (default) for x's.
        out: the tensor for y, contiguous, of its shape and dtype, in memory of its own; None (default) allocates
            it.

    Returns:
        Tensor: y [..., cols] contiguous; `out` if it is not None.

    Raises:
        KernelInputError: a wrong number of norms, shape, dtype, device or value; or gradients are enabled and an
            argument requires one.
        UnsupportedShapeError: strides that no kernel handles; nothing is copied to make them fit.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_forward_bytes`: x and y once each, for any number of norms.  Rows beyond 16384
    columns are read once more from L1 or L2 for every norm.

    Examples:
        >>> import torch, fusednorm
        >>> from fusednorm.reference import chain
        >>> run = fusednorm.layer_norm_chain if torch.cuda.is_available() else chain.layer_norm_chain
        >>> x = torch.randn(8, 1024).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> run(x, [torch.ones_like(x[0]), None]).shape
        torch.Size([8, 1024])
    """
    weights = tuple(weights)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    inputs, options = (x, *weights, *biases), (len(weights), len(biases), eps, out_dtype)
    if not 1 <= len(weights) <= MAX_NORMS:
        raise KernelInputError(f"weights must hold 1 to {MAX_NORMS} norms, got {len(weights)}")
    if len(biases) != len(weights):
        raise KernelInputError(f"biases must be as many as weights, {len(weights)}, got {len(biases)}")
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in inputs):
        raise KernelInputError("layer_norm_chain has no derivative: call it under torch.no_grad()")
    given = None if out is None else Forward(out)
    repeated = CHAIN.try_replay(inputs, options, given)
    if repeated is not None:
        return repeated.y
    eps = validate_eps(eps)
    norms = range(len(weights))
    names = ["x", *(f"weights[{index}]" for index in norms), *(f"biases[{index}]" for index in norms)]
    (described, *parameters), named = describe_as_arrays(names, inputs)
    assert described is not None
    check_float("x", described)
    x_rows = view_as_rows("x", described)
    for name, parameter in zip(names[1:], parameters, strict=True):
        check_parameter(name, parameter, described.shape[-1:], described)
    y_dtype = described.dtype if out_dtype is None else name_dtype(out_dtype)
    check_out_dtype(y_dtype)
    outputs = declare_forward_outputs(None, y_dtype, stats=False, is_rms=False)
    result = prepare_result_tensors(Forward, outputs, x, given)
    if x_rows.shape[0]:
        y, *_ = describe_results(outputs, result, described, given, named)
        arrays = tuple(parameters)
        launches = plan_chain(ChainCall(x_rows, arrays[: len(norms)], arrays[len(norms) :], eps, y))
        run_launches(x.device, launches, named)
        CHAIN.record(launches, outputs, named, inputs, options)
    return result.y
