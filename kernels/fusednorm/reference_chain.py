"""The oracle of `layer_norm_chain`: `reference.layer_norm_forward` of its own result, nothing rounded between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm.reference import layer_norm_forward


def layer_norm_chain(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] | None = None,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """y = LN_k(... LN_2(LN_1(x))) over the last axis.

    Args:
        x: [..., cols], any float dtype, any strides.
        weights, biases: [cols] or None for each norm, the same number of both; biases None for no biases at all.
        eps: added to each variance.
        out_dtype: y's dtype; x's when None.
        precision: torch.float32 or torch.float64, of every step.
    """
    y = x.to(precision)
    biases = [None] * len(weights) if biases is None else biases
    for weight, bias in zip(weights, biases, strict=True):
        y = layer_norm_forward(y, weight, bias, eps=eps, precision=precision).y
    return y.to(out_dtype or x.dtype)
