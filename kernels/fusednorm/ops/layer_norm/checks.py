"""The checks of a call of LayerNorm or RMSNorm, which turn its inputs into rows."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.checks import (
    MAX_COLS,
    check_channel_modulations,
    check_channels,
    check_float,
    check_gate,
    check_parameter,
    check_statistics,
    check_weight_offset,
    count_samples,
    has_heads,
    select_modulations,
    select_row_view,
    view_as_rows,
)
from fusednorm.arguments.inputs import BackwardInputs, NormInputs, ShapeRole, group_names_by_role
from fusednorm.arguments.layouts import has_channel_rows, move_channels_last
from fusednorm.arguments.options import NormOptions, collect_arguments
from fusednorm.errors import KernelInputError, UnsupportedShapeError

_LIKE_X: dict[type, tuple[str, ...]] = {
    each: group_names_by_role(each._fields)[ShapeRole.LIKE_X] for each in (NormInputs, BackwardInputs)
}
_PARAMETERS = group_names_by_role(NormInputs._fields)[ShapeRole.PARAMETER]


def check_layout_and_rows(
    options: NormOptions, inputs: NormInputs[Array] | BackwardInputs[Array]
) -> dict[str, Any]:
    """Check all arrays of a LayerNorm or RMSNorm call, and return them by name, as views in the order of its rows.

    The views are those of `check_rows`, or, if the channels of contiguous arrays are normalised over, those of
    `LayerNormCall`.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
        UnsupportedShapeError: strides that no kernel handles, or too many columns.
    """
    if options.layout is None:
        return check_rows(options, inputs)
    x = inputs.x
    check_channels(x, inputs.weight, inputs.bias)
    check_gate(inputs.gate, inputs.residual)
    check_channel_modulations(select_modulations(inputs.scale, inputs.shift, inputs.gate), x)
    like_x = {name: getattr(inputs, name) for name in _LIKE_X[type(inputs)] if getattr(inputs, name) is not None}
    for name, array in like_x.items():
        check_float(name, array, shape_like=x)
    if has_channel_rows(x):
        _check_layouts(like_x, has_channel_rows, "channels-last as x is")
        moved = {name: move_channels_last(array) for name, array in like_x.items()}
        return check_rows(options, inputs._replace(**moved))
    _check_layouts({"x": x}, Array.is_contiguous, "contiguous or channels-last")
    _check_layouts(like_x, Array.is_contiguous, "contiguous as x is")
    if max(x.shape[1], math.prod(x.shape[2:])) > MAX_COLS:
        raise UnsupportedShapeError(
            f"a contiguous x must have at most {MAX_COLS} channels and positions, got shape {list(x.shape)}"
        )
    for name in _PARAMETERS:
        check_parameter(name, getattr(inputs, name), x.shape[1:2], x)
    check_weight_offset(options.weight_offset, inputs.weight)
    if isinstance(inputs, BackwardInputs):
        check_statistics(inputs.mean, inputs.rstd, (x.shape[0], *x.shape[2:]))
    views = {name: view_as_positions(array) for name, array in like_x.items()}
    return collect_arguments(options.op, inputs._replace(**views))


def _check_layouts(arrays: dict[str, Array], has_layout: Callable[[Array], bool], layout: str) -> None:
    """Raise UnsupportedShapeError unless all arrays have a layout, `layout` in words."""
    for name, array in arrays.items():
        if not has_layout(array):
            raise UnsupportedShapeError(
                f"{name} must be {layout}, got shape {list(array.shape)} with strides {list(array.strides)}"
            )


def view_as_positions(array: Array) -> Array:
    """Describe a contiguous array [N, C, *spatial] as its view [positions, N, C]."""
    samples, channels, *spatial = array.shape
    positions = math.prod(spatial)
    strides = (1, channels * positions, positions)
    return replace(array, shape=(positions, samples, channels), strides=strides, is_dense=False)


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
    check_gate(inputs.gate, inputs.residual)
    modulations = select_modulations(inputs.scale, inputs.shift, inputs.gate)
    if modulations and own:
        names = " and ".join(modulations)
        raise KernelInputError(f"parameters must be [cols] in a call with {names}, got parameters of each head")
    view = view_as_rows if modulations else select_row_view(own, *map(arrays.get, like_x))
    for name in like_x:
        if arrays[name] is not None:
            arrays[name] = view(name, arrays[name])
    shape = x.shape[-2:] if own else x.shape[-1:]
    for name in _PARAMETERS:
        check_parameter(name, arrays.get(name), shape, x)
    if modulations:
        samples = count_samples(x.shape, modulations)
        check_modulations(modulations)
        for name in like_x:
            if arrays[name] is not None:
                arrays[name] = view_as_samples(arrays[name], samples)
        for name, array in modulations.items():
            arrays[name] = view_as_rows(name, array)
    check_weight_offset(options.weight_offset, inputs.weight)
    if isinstance(inputs, BackwardInputs):
        check_statistics(inputs.mean, inputs.rstd, x.shape[:-1])
    return arrays


def view_as_samples(rows: Array, samples: int) -> Array:
    """Return the view [tokens, samples, cols] of [rows, cols], whose samples are consecutive rows."""
    tokens = rows.shape[0] // max(samples, 1)
    stride = rows.strides[0]
    return rows.view((tokens, samples, rows.shape[1]), (stride, tokens * stride, rows.strides[1]))


def check_modulations(modulations: dict[str, Array]) -> None:
    """Check that the tensors of each sample have supported dtypes, and one stride between samples.

    Raises:
        KernelInputError: wrong dtype.
        UnsupportedShapeError: different strides, or samples that no stride separates.
    """
    strides = set()
    for name, array in modulations.items():
        check_float(name, array)
        rows = view_as_rows(name, array)
        if rows.shape[0] > 1:
            strides.add(rows.strides[0])
    if len(strides) > 1:
        raise UnsupportedShapeError(
            f"{' and '.join(modulations)} must have one stride from sample to sample, got {sorted(strides)}"
        )
