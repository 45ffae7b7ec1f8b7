"""The results of LayerNorm's and RMSNorm's passes."""

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.outputs import Output, Outputs


def forward_outputs(residual: Array | None, dtype: str, stats: bool, is_rms: bool) -> Outputs:
    """The outputs of a forward pass whose y has the given dtype, one per field of `Forward`."""
    return (
        Output("y", dtype),
        Output("mean", "float32", axes_less=1) if stats and not is_rms else None,
        Output("rstd", "float32", axes_less=1) if stats else None,
        None if residual is None else Output("residual_out", residual.dtype),
        Output("scale", "float32", axes_less=1) if dtype == FLOAT8 else None,
    )


def backward_outputs(x: Array, weight: Array | None, bias: Array | None, residual: Array | None) -> Outputs:
    """The outputs of a backward pass, one per field of `Backward`; no gradient for a parameter that is None."""
    dx = Output("dx", x.dtype)
    dresidual = None if residual is None else dx
    if residual is not None and residual.dtype != x.dtype:
        dresidual = Output("dresidual", residual.dtype)
    return (
        dx,
        None if weight is None else Output("dweight", weight.dtype, weight.shape),
        None if bias is None else Output("dbias", bias.dtype, bias.shape),
        dresidual,
        None,
        None,
    )
