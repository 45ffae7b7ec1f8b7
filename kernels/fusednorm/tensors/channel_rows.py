"""Norms over the channels of [N, C, *spatial] by norms of rows: channels are moved to the end, and results back."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusednorm.arguments.checks import check_channels, check_layout, check_shape
from fusednorm.results import Backward, Forward
from fusednorm.tensors.layouts import convert_to_layout, select_channels_last

_LIKE_X = ("x", "residual", "dy", "dresidual_out")


def compute_forward_over_channels(run: Callable[..., Forward], arguments: dict[str, Any]) -> Forward:
    """Compute a forward pass with a layout by `run`, which computes it over rows.

    Args:
        arguments: those of the pass by name, also the layout.

    Raises:
        KernelInputError: no such layout, a wrong shape, or a reason of `run`.
    """
    x, rows = arguments["x"], _convert_arguments(arguments)
    result = run(**rows)
    channels_last = select_channels_last(x)
    return result._replace(
        y=_restore_layout(result.y, channels_last),
        residual_out=None if result.residual_out is None else _restore_layout(result.residual_out, channels_last),
    )


def compute_backward_over_channels(run: Callable[..., Backward], arguments: dict[str, Any]) -> Backward:
    """Compute a backward pass with a layout by `run`, as `compute_forward_over_channels` does."""
    x, rows = arguments["x"], _convert_arguments(arguments)
    result = run(**rows)
    channels_last = select_channels_last(x)
    dx = _restore_layout(result.dx, channels_last)
    dresidual = result.dresidual
    if dresidual is not None:
        dresidual = dx if dresidual is result.dx else _restore_layout(dresidual, channels_last)
    return result._replace(dx=dx, dresidual=dresidual)


def _convert_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a pass over channels to those of one over rows."""
    x, rows = arguments["x"], {name: value for name, value in arguments.items() if name != "layout"}
    check_layout(arguments["layout"])
    check_channels(x, arguments["weight"], arguments.get("bias"))
    for name in ("scale", "shift", "gate"):
        if arguments[name] is not None:
            check_shape(name, arguments[name], x.shape[:2], x)
    for name in _LIKE_X:
        tensor = rows.get(name)
        if tensor is not None:
            if name != "x":
                check_shape(name, tensor, x.shape, x)
            rows[name] = tensor.movedim(1, -1)
    return rows


def _restore_layout(result: Tensor, channels_last: bool) -> Tensor:
    """Move the channels of a result [N, *spatial, C] back, in memory of the given layout.

    The result is no view, since torch would not change a view in place as the result of an autograd function.
    """
    restored = convert_to_layout(result.movedim(-1, 1), channels_last)
    return restored.clone() if restored._is_view() else restored
