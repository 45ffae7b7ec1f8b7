"""The results of LayerNorm's and RMSNorm's passes."""

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.outputs import Outputs, OutputSpec


def declare_forward_outputs(residual: Array | None, dtype: str, stats: bool, is_rms: bool) -> Outputs:
    """Declare shape and dtype of each output of a forward pass, in the order of the fields of `Forward`.

    y has the given dtype; if that is float8, the scale of each row is an output too.  Mean and rstd are
    outputs if `stats`.  An output that does not exist is None.
    """
    return (
        OutputSpec("y", dtype),
        OutputSpec("mean", "float32", dropped_axes=1) if stats and not is_rms else None,
        OutputSpec("rstd", "float32", dropped_axes=1) if stats else None,
        None if residual is None else OutputSpec("residual_out", residual.dtype),
        OutputSpec("y_scale", "float32", dropped_axes=1) if dtype == FLOAT8 else None,
    )


def declare_backward_outputs(x: Array, parameters: tuple[Array | None, ...], residual: Array | None) -> Outputs:
    """Declare shape and dtype of each output of a backward pass, in the order of the fields of `Backward`.

    `parameters` are weight, bias, scale and shift; one that is None has no gradient.  If x and residual have
    the same dtype, dresidual is dx.
    """
    gradients = [
        None if parameter is None else OutputSpec(f"d{name}", parameter.dtype, parameter.shape)
        for name, parameter in zip(("weight", "bias", "scale", "shift"), parameters, strict=True)
    ]
    dx = OutputSpec("dx", x.dtype)
    dresidual = None if residual is None else dx
    if residual is not None and residual.dtype != x.dtype:
        dresidual = OutputSpec("dresidual", residual.dtype)
    return dx, *gradients[:2], dresidual, *gradients[2:]
