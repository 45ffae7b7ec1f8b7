"""The results of all forward and all backward launchers."""

from typing import TYPE_CHECKING, Generic, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeVar

    A = TypeVar("A", default=Tensor)
else:
    from typing import TypeVar

    A = TypeVar("A")


class Forward(NamedTuple, Generic[A]):
    """The results of a forward pass; results that the call does not have are None.

    Attributes:
        y: the normalised tensor, in x's shape.
        mean: float32 mean of each row or group (never for RMSNorm), if statistics were requested.
        rstd: float32 reciprocal standard deviation of each row or group, if statistics were requested.
        residual_out: h = x + residual, the tensor that was normalised, if there is a residual; in the residual's
            dtype, for GroupNorm in x's.
        scale: float32 scale of each row, if y is float8_e4m3fn: the normalised row is y * scale.
    """

    y: A
    mean: A | None = None
    rstd: A | None = None
    residual_out: A | None = None
    scale: A | None = None


class Backward(NamedTuple, Generic[A]):
    """The gradients of a backward pass; gradients that the call does not have are None.

    Attributes:
        dx: the gradient of x, in x's shape and dtype.
        dweight: the gradient of weight, if there is one.
        dbias: the gradient of bias, if there is one.
        dresidual: the gradient of the residual, if there is one: dx itself, unless the residual's dtype differs
            from x's.  For GroupNorm it is always dx.
        dscale: the gradient of GroupNorm's scale [N, C], if there is one.
        dshift: the gradient of GroupNorm's shift [N, C], if there is one.
    """

    dx: A
    dweight: A | None = None
    dbias: A | None = None
    dresidual: A | None = None
    dscale: A | None = None
    dshift: A | None = None
