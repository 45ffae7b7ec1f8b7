"""The reference of `layer_norm_chain`: repeated `reference.layer_norm_forward`, without rounding between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float, check_result_dtype
from fusednorm.reference.reference_passes import layer_norm_forward


def layer_norm_chain(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] | None = None,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Compute y = LN_k(... LN_2(LN_1(x))) over the last axis.

    Args:
        x: [..., cols], float32, float16, bfloat16 or float64, any strides.
        weights, biases: [cols] or None for each norm, the same number of both; biases None for no biases at all.
        eps: added to each variance; at least 0 and finite.
        out_dtype: y's dtype, any of these; x's when None.
        precision: the dtype of every step, torch.float32 or torch.float64.

    Raises:
        KernelInputError: no norm, a wrong number of biases, or an argument that `layer_norm_forward` refuses.
    """
    check_float("x", x)
    check_result_dtype(out_dtype, float8=False)
    if len(weights) == 0:
        raise KernelInputError("weights must hold at least 1 norm, got 0")
    biases = [None] * len(weights) if biases is None else biases
    if len(biases) != len(weights):
        raise KernelInputError(f"biases must be as many as weights, {len(weights)}, got {len(biases)}")
    y = x.to(precision)
    for weight, bias in zip(weights, biases, strict=True):
        y = layer_norm_forward(y, weight, bias, eps=eps, precision=precision).y
    return y.to(out_dtype or x.dtype)
