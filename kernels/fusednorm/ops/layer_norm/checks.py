"""The checks of a call of LayerNorm or RMSNorm, which turn its inputs into rows."""

from typing import Any

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.checks import (
    check_float,
    check_parameter,
    check_statistics,
    check_weight_offset,
    has_heads,
    select_row_view,
)
from fusednorm.arguments.inputs import BackwardInputs, NormInputs, ShapeRole, group_names_by_role
from fusednorm.arguments.options import NormOptions, collect_arguments

_LIKE_X: dict[type, tuple[str, ...]] = {
    each: group_names_by_role(each._fields)[ShapeRole.LIKE_X] for each in (NormInputs, BackwardInputs)
}
_PARAMETERS = group_names_by_role(NormInputs._fields)[ShapeRole.PARAMETER]


def check_rows(options: NormOptions, inputs: NormInputs[Array] | BackwardInputs[Array]) -> dict[str, Any]:
    """Check all arrays of a LayerNorm or RMSNorm call, and return them by name.

    Arrays of x's shape are returned as views [rows, cols], or [tokens, heads, cols] if heads have separate
    parameters or rows have no common stride.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
        UnsupportedShapeError: strides that no kernel handles, or too many columns.
    """
    x = inputs.x
    arrays = collect_arguments(options.op, inputs)
    like_x = _LIKE_X[type(inputs)]
    for name in like_x:
        if arrays[name] is not None:
            check_float(name, arrays[name], shape_like=x)
    own = has_heads(inputs.weight, inputs.bias)
    view = select_row_view(own, *map(arrays.get, like_x))
    for name in like_x:
        if arrays[name] is not None:
            arrays[name] = view(name, arrays[name])
    shape = x.shape[-2:] if own else x.shape[-1:]
    for name in _PARAMETERS:
        check_parameter(name, arrays.get(name), shape, x)
    check_weight_offset(options.weight_offset, inputs.weight)
    if isinstance(inputs, BackwardInputs):
        check_statistics(inputs.mean, inputs.rstd, x.shape[:-1])
    return arrays
