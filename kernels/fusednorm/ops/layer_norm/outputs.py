"""The results of LayerNorm's and RMSNorm's passes."""

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.inputs import NormInputs, has_own_gradient
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


def declare_backward_outputs(inputs: NormInputs[Array], parameter_gradients: bool) -> Outputs:
    """Declare shape and dtype of each output of a backward pass, in the order of the fields of `Backward`.

    Without `parameter_gradients` weight and bias have no gradient.
    """
    x, residual = inputs.x, inputs.residual
    specs = {
        name: OutputSpec(f"d{name}", array.dtype, array.shape)
        for name, array in inputs._asdict().items()
        if array is not None and (parameter_gradients or name not in ("weight", "bias"))
    }
    specs["x"] = OutputSpec("dx", x.dtype)
    if residual is not None:
        own = has_own_gradient("layer_norm", inputs)
        specs["residual"] = OutputSpec("dresidual", residual.dtype) if own else specs["x"]
    return tuple(map(specs.get, inputs._fields))
