"""The results of LayerNorm's and RMSNorm's passes."""

from functools import partial

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.inputs import NormInputs, has_own_gradient
from fusednorm.arguments.outputs import Outputs, OutputSpec


def declare_forward_outputs(
    residual: Array | None, dtype: str, stats: bool, is_rms: bool, positions_shape: tuple[int, ...] | None = None
) -> Outputs:
    """Declare shape and dtype of each output of a forward pass, in the order of the fields of `Forward`.

    y has the given dtype; if that is float8, y_scale of each row is an output too.  Mean and rstd are
    outputs if `stats`.  An output that does not exist is None.
    For a norm over channels, `positions_shape` is x's shape without them; outputs of x's shape have x's layout.
    """
    of_rows = partial(OutputSpec, dtype="float32", shape=positions_shape, dropped_axes=1)
    has_x_layout = positions_shape is not None
    return (
        OutputSpec("y", dtype, has_x_layout=has_x_layout),
        of_rows("mean") if stats and not is_rms else None,
        of_rows("rstd") if stats else None,
        None if residual is None else OutputSpec("residual_out", residual.dtype, has_x_layout=has_x_layout),
        of_rows("y_scale") if dtype == FLOAT8 else None,
    )


def declare_backward_outputs(
    inputs: NormInputs[Array], parameter_gradients: bool, has_x_layout: bool = False
) -> Outputs:
    """Declare shape and dtype of each output of a backward pass, in the order of the fields of `Backward`.

    Without `parameter_gradients` weight and bias have no gradient.  `has_x_layout`: whether outputs of x's shape
    have x's layout, for a norm over channels.
    """
    x, residual = inputs.x, inputs.residual
    specs = {
        name: OutputSpec(f"d{name}", array.dtype, array.shape)
        for name, array in inputs._asdict().items()
        if array is not None and (parameter_gradients or name not in ("weight", "bias"))
    }
    specs["x"] = OutputSpec("dx", x.dtype, has_x_layout=has_x_layout)
    if residual is not None:
        own = has_own_gradient("layer_norm", inputs)
        of_residual = OutputSpec("dresidual", residual.dtype, has_x_layout=has_x_layout)
        specs["residual"] = of_residual if own else specs["x"]
    return tuple(map(specs.get, inputs._fields))
