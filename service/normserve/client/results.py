"""The results of operations: one type for forward passes, one for backward passes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _LazyFields:
    """The base class of `Timing`.  It computes the fields only at the first access to one of them, because few
    callers read them.
    """

    __slots__ = ("_understand", "_values")

    def __getattr__(self, name: str) -> Any:
        """Compute the missing fields; threads that read at the same time get identical objects."""
        if name not in Timing.__slots__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        for field_name, value in zip(Timing.__slots__, self._understand(*self._values), strict=True):
            object.__setattr__(self, field_name, value)
        return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True)
class Timing(_LazyFields):
    """The server's timing of one request.

    Attributes:
        stages_ms: milliseconds in each of the server's stages: recv, queue, copy_in, kernel, copy_out.
        kernel_bytes: the fewest bytes that this request must move on the device.
        kernel_bandwidth: bytes a second that the launch reached on the device.
        batch_size: requests that shared the launch.
        request_id: names the request in the server's log.
    """

    stages_ms: Mapping[str, float] = field(default_factory=dict)
    kernel_bytes: int = 0
    kernel_bandwidth: float = 0.0
    batch_size: int = 1
    request_id: str = ""

    @classmethod
    def later(cls, understand: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> "Timing":
        """Make a timing whose fields are computed only at the first access to one of them.

        Args:
            understand: computes the fields, in order, from `values`; raises nothing.
            values: the arguments of `understand`.

        Returns:
            Timing: without computed fields.
        """
        timing = _new(cls)
        _set_understand(timing, understand)
        _set_values(timing, values)
        return timing


# `object.__setattr__` takes twice as long.
_new = object.__new__
_set_understand: Callable[[object, object], None] = vars(_LazyFields)["_understand"].__set__
_set_values: Callable[[object, object], None] = vars(_LazyFields)["_values"].__set__


@dataclass(frozen=True, slots=True)
class ForwardResult(Generic[T]):
    """The result of a forward pass, with arrays of x's library on x's device; a result not requested is None.

    Attributes:
        y: the normalised tensor, in x's shape.
        residual_out: h = x + residual, the tensor that was normalised, if there is a residual; in the
            residual's dtype, for GroupNorm in x's.
        mean: float32 mean of each row or group (never for RMSNorm), if statistics were requested.
        rstd: float32 reciprocal standard deviation of each row or group, if statistics were requested.
        timing: the `Timing` of the request on the server.
        scale: float32 scale of each row, if y is float8_e4m3fn: the normalised row is y * scale.  It is not the
            argument scale of a call.
    """

    y: T
    residual_out: T | None
    mean: T | None
    rstd: T | None
    timing: Timing
    scale: T | None = None


@dataclass(frozen=True, slots=True)
class BackwardResult(Generic[T]):
    """The gradients of a backward pass, each of the same array library and on the same device as its argument.

    Attributes:
        dx: the gradient of x, and also of the residual unless there is a dresidual, in x's shape and dtype.
        dweight: the gradient of weight, if there is one, else None.
        dbias: the gradient of bias, if there is one, else None.
        dscale: the gradient of scale, if there is one, else None.
        dshift: the gradient of shift, if there is one, else None.
        timing: the `Timing` of the request on the server.
        dresidual: the gradient of the residual, if there is a gate or the residual's dtype is not x's; None
            otherwise, and always for GroupNorm.
        dgate: the gradient of gate, if there is one, else None.
    """

    dx: T
    dweight: T | None
    dbias: T | None
    dscale: T | None
    dshift: T | None
    timing: Timing
    dresidual: T | None = None
    dgate: T | None = None
