"""The checks of a call of GroupNorm."""

from math import prod

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.checks import (
    check_channel_modulations,
    check_float,
    check_groups,
    check_parameter,
    check_statistics,
    select_modulations,
)
from fusednorm.arguments.inputs import BackwardInputs, NormInputs, group_names_by_role
from fusednorm.arguments.layouts import detect_channels_last
from fusednorm.arguments.options import NormOptions
from fusednorm.ops.group_norm.sample_shape import SampleShape

_LIKE_X, _, _PARAMETERS, _ = group_names_by_role(BackwardInputs._fields)


def check_sample(options: NormOptions, inputs: NormInputs[Array] | BackwardInputs[Array]) -> SampleShape:
    """Check all inputs of a GroupNorm call, and return the shape of one sample of x.

    Raises:
        KernelInputError: a wrong shape, dtype or value, or an empty group.
        UnsupportedShapeError: a layout or strides that no kernel handles.
    """
    x = inputs.x
    check_float("x", x)
    check_groups(x, options.num_groups)
    channels_last = detect_channels_last(x)
    for name in _PARAMETERS:
        check_parameter(name, getattr(inputs, name), x.shape[1:2], x)
    for name in _LIKE_X[1:]:
        array = getattr(inputs, name, None)
        if array is not None:
            check_float(name, array, shape_like=x)
            detect_channels_last(array, name)
    check_channel_modulations(select_modulations(inputs.scale, inputs.shift, None), x)
    groups = options.num_groups
    if isinstance(inputs, BackwardInputs):
        check_statistics(inputs.mean, inputs.rstd, (x.shape[0], groups))
    return SampleShape(groups, x.shape[1] // groups, prod(x.shape[2:]), channels_last)
