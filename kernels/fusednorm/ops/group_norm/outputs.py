"""The results of GroupNorm's passes."""

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.ops.group_norm.sample_shape import SampleShape


def declare_forward_outputs(
    x: Array, sample: SampleShape, residual: Array | None, dtype: str, stats: bool
) -> Outputs:
    """Declare shape and dtype of each output of a forward pass, in the order of the fields of `Forward`.

    y has the given dtype.  Mean and rstd are outputs if `stats`.  An output that does not exist is None.
    """
    groups = (x.shape[0], sample.groups)
    return (
        OutputSpec("y", dtype, has_x_layout=True),
        OutputSpec("mean", "float32", groups) if stats else None,
        OutputSpec("rstd", "float32", groups) if stats else None,
        None if residual is None else OutputSpec("residual_out", x.dtype, has_x_layout=True),
        None,
    )


def declare_backward_outputs(x: Array, parameters: tuple[Array | None, ...], has_residual: bool) -> Outputs:
    """Declare shape and dtype of each output of a backward pass, in the order of the fields of `Backward`.

    `parameters` are weight, bias, scale and shift; a parameter that is None has no gradient.  If `has_residual`,
    the gradient of the residual is the same tensor as dx.
    """
    dx = OutputSpec("dx", x.dtype, has_x_layout=True)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else OutputSpec(name, parameter.dtype, parameter.shape)
        for name, parameter in zip(("dweight", "dbias", "dscale", "dshift"), parameters, strict=True)
    )
    return dx, dweight, dbias, dx if has_residual else None, dscale, dshift, None
