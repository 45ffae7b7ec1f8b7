"""The results of all forward and all backward launchers."""

from typing import NamedTuple

from torch import Tensor


class Forward(NamedTuple):
    """Result of a forward pass; what was not asked for is None.

    Attributes:
        y: the normalised tensor, in x's shape.
        mean: float32 mean of each row or group (never for RMSNorm), when statistics were asked for.
        rstd: float32 reciprocal standard deviation of each row or group, when statistics were asked for.
        residual_out: h = x + residual, the tensor that was normalised, when a residual came in; in the residual's
            dtype, for GroupNorm in x's.
        scale: float32 scale of each row, when y is float8_e4m3fn: the normalised row is y * scale.
    """

    y: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    residual_out: Tensor | None = None
    scale: Tensor | None = None


class Backward(NamedTuple):
    """Result of a backward pass; what was not asked for is None.

    Attributes:
        dx: the gradient of x, in x's shape and dtype.
        dweight: the gradient of weight, when weight came in.
        dbias: the gradient of bias, when bias came in.
        dresidual: the gradient of the residual, when one came in: dx itself, unless the residual's dtype is another
            than x's.  GroupNorm's is always dx.
        dscale: the gradient of GroupNorm's scale [N, C], when one came in.
        dshift: the gradient of GroupNorm's shift [N, C], when one came in.
    """

    dx: Tensor
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dresidual: Tensor | None = None
    dscale: Tensor | None = None
    dshift: Tensor | None = None
