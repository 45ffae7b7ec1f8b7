"""The results of GroupNorm's passes."""

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.outputs import Output, Outputs
from fusednorm.ops.group_norm.sample import Sample


def forward_outputs(x: Array, sample: Sample, residual: Array | None, dtype: str, stats: bool) -> Outputs:
    """The outputs of a forward pass whose y has the given dtype, one per field of `Forward`."""
    groups = (x.shape[0], sample.groups)
    return (
        Output("y", dtype, as_x=True),
        Output("mean", "float32", groups) if stats else None,
        Output("rstd", "float32", groups) if stats else None,
        None if residual is None else Output("residual_out", x.dtype, as_x=True),
        None,
    )


def backward_outputs(x: Array, parameters: tuple[Array | None, ...], residual: bool) -> Outputs:
    """The outputs of a backward pass, one per field of `Backward`; `parameters` are weight, bias, scale and shift.

    A parameter that is None has no gradient.
    """
    dx = Output("dx", x.dtype, as_x=True)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else Output(name, parameter.dtype, parameter.shape)
        for name, parameter in zip(("dweight", "dbias", "dscale", "dshift"), parameters, strict=True)
    )
    return dx, dweight, dbias, dx if residual else None, dscale, dshift
