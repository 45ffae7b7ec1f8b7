"""The results of GroupNorm's passes."""

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.ops.group_norm.sample_shape import SampleShape


def declare_forward_outputs(
    x: Array, sample: SampleShape, residual: Array | None, dtype: str, stats: bool
) -> Outputs:
    """Declare the outputs of a forward pass whose y has the given dtype, one per field of `Forward`."""
    groups = (x.shape[0], sample.groups)
    return (
        OutputSpec("y", dtype, has_x_layout=True),
        OutputSpec("mean", "float32", groups) if stats else None,
        OutputSpec("rstd", "float32", groups) if stats else None,
        None if residual is None else OutputSpec("residual_out", x.dtype, has_x_layout=True),
        None,
    )


def declare_backward_outputs(x: Array, parameters: tuple[Array | None, ...], residual: bool) -> Outputs:
    """Declare the outputs of a backward pass, one per field of `Backward`.

    `parameters` are weight, bias, scale and shift.

    A parameter that is None has no gradient.
    """
    dx = OutputSpec("dx", x.dtype, has_x_layout=True)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else OutputSpec(name, parameter.dtype, parameter.shape)
        for name, parameter in zip(("dweight", "dbias", "dscale", "dshift"), parameters, strict=True)
    )
    return dx, dweight, dbias, dx if residual else None, dscale, dshift
