"""The results of all forward and all backward launchers."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

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
        residual_out: h = residual + gate * x, the tensor that was normalised, if there is a residual; in the
            residual's dtype, for GroupNorm in x's.
        y_scale: float32 scale of each row, if y is float8_e4m3fn: the normalised row is y * y_scale.  Its old name
            `scale` still works, with a DeprecationWarning, until 0.3.0.
    """

    y: A
    mean: A | None = None
    rstd: A | None = None
    residual_out: A | None = None
    y_scale: A | None = None

    @property
    def scale(self) -> A | None:
        """The old name of y_scale."""
        _warn_of_old_name()
        return self.y_scale


def _warn_of_old_name() -> None:
    message = "Forward.scale is called Forward.y_scale, and the old name will be removed in 0.3.0"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _accept_old_name(make: Callable[..., "Forward[A]"]) -> Callable[..., "Forward[A]"]:
    """Let a function that makes results take y_scale by its old name, too."""

    @wraps(make)
    def make_with_either_name(*values: Any, **named: Any) -> "Forward[A]":
        if "scale" in named:
            _warn_of_old_name()
            named["y_scale"] = named.pop("scale")
        return make(*values, **named)

    return make_with_either_name


# A named tuple's class cannot define these functions itself.
for _name in ("__new__", "_replace"):
    setattr(Forward, _name, _accept_old_name(getattr(Forward, _name)))


class Added(NamedTuple, Generic[A]):
    """Result of a norm after a residual addition.

    Attributes:
        y: the normalised sum.
        residual_out: residual + gate * x, in the residual's dtype; for a group norm in x's dtype.
    """

    y: A
    residual_out: A


class Backward(NamedTuple, Generic[A]):
    """The gradients of a backward pass; gradients that the call does not have are None.

    Attributes:
        dx: the gradient of x, in x's shape and dtype.
        dweight: the gradient of weight, if there is one.
        dbias: the gradient of bias, if there is one.
        dresidual: the gradient of the residual, if there is one: dx itself, unless there is a gate or the
            residual's dtype differs from x's.  For GroupNorm it is always dx.
        dscale, dshift, dgate: the gradients of scale, shift and gate, if there are any, in their shapes.
    """

    dx: A
    dweight: A | None = None
    dbias: A | None = None
    dresidual: A | None = None
    dscale: A | None = None
    dshift: A | None = None
    dgate: A | None = None
