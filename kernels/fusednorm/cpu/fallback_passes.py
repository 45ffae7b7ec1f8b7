"""Calls that torch's norms alone cannot compute: `fusednorm.cpu.batch_invariant` computes them.

The reference computes float64, LayerNorm of rows of one value, whose gradient torch's kernel rounds, and small
calls with parameters for each head, or gradients of scale and shift; it also reports the errors of calls that the
checks here reject.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm import reference
from fusednorm.arguments.checks import (
    DEFAULT_SLOPE,
    check_dropout,
    check_gate,
    count_samples,
    has_heads,
    select_modulations,
)
from fusednorm.cpu import batch_invariant
from fusednorm.cpu.batch_invariant.row_modulation import compute_sample_shape
from fusednorm.cpu.supported_arguments import (
    has_float_tensors,
    is_valid_activation,
    is_valid_eps,
    is_valid_offset,
)
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward
from fusednorm.tensors.layouts import convert_to_layout, is_in_layout

_SMALL_ELEMENTS = 512 * 1024
"""The most elements for which the reference is faster without dropout: see `_is_reference_faster`."""

_LIKE_X = ("x", "residual", "dy", "dresidual_out", "y", "residual_out", "dx", "dresidual")
_STATISTICS = ("mean", "rstd")
_GRADIENTS_OF_SAMPLES = {"dscale": "scale", "dshift": "shift", "dgate": "gate"}


def compute_fallback_forward(op: str, **arguments: Any) -> Forward:
    """Compute, with `batch_invariant` or the reference, a forward pass that torch's own norms do not support.

    The arguments are those of `fusednorm.reference`, all by name.  The reference computes calls for which it
    takes less time, calls in float64, and invalid calls, whose errors it raises.
    """
    if _is_reference_faster(arguments) or not _is_supported_by_batch_invariant(op, **arguments):
        computed: Forward = getattr(reference, f"{op}_forward")(**arguments)
        return computed
    results = getattr(batch_invariant, f"{op}_forward")(**_convert_arguments_for_batch_invariant(op, arguments))
    return Forward(**_restore_results(op, arguments, results._asdict()))


def compute_fallback_backward(op: str, *, parameter_gradients: bool, **arguments: Any) -> Backward:
    """Compute, with `batch_invariant` or the reference, a backward pass that torch's own norms do not support.

    The arguments are those of `fusednorm.reference`, all by name.  The reference computes calls for which it
    takes less time, calls in float64, and invalid calls, whose errors it raises.
    """
    if _is_reference_faster(arguments) or not _is_supported_by_batch_invariant(op, **arguments):
        run = getattr(reference, f"{op}_backward")
        computed: Backward = run(**arguments, parameter_gradients=parameter_gradients)
        return computed
    results: Backward = getattr(batch_invariant, f"{op}_backward")(
        **_convert_arguments_for_batch_invariant(op, arguments)
    )
    gradients = Backward(**_restore_results(op, arguments, results._asdict()))
    if results.dresidual is results.dx:
        gradients = gradients._replace(dresidual=gradients.dx)
    return gradients if parameter_gradients else gradients._replace(dweight=None, dbias=None)


def _is_supported_by_batch_invariant(
    op: str,
    *,
    x: Tensor,
    eps: float,
    activation: str,
    dropout: float,
    seed: int | None,
    negative_slope: float = DEFAULT_SLOPE,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    num_groups: int = 0,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    layout: None = None,
    stats: bool = False,
    **like_x: Tensor | None,
) -> bool:
    """Return whether `batch_invariant` can compute a call: its arguments are valid, and none is float64.

    Return False, too, for an empty x, for an x of GroupNorm that is neither contiguous nor channels-last,
    and for LayerNorm of rows of one value.
    """
    shape = x.shape
    modulations = select_modulations(scale, shift, gate)
    if op == "group_norm":
        is_laid_out = len(shape) > 1 and (x.is_contiguous() or (len(shape) > 2 and is_in_layout(x, True)))
        if not (is_laid_out and type(num_groups) is int and num_groups > 0 and shape[1] % num_groups == 0):
            return False
        of_parameters: tuple[int, ...] = shape[1:2]
        of_statistics: tuple[int, ...] = (shape[0], num_groups)
        if not has_float_tensors(shape[:2], scale, shift):
            return False
    else:
        least = 2 if op == "layer_norm" else 1
        is_laid_out = len(shape) > 0 and shape[-1] >= least
        own_parameters = has_heads(weight, bias)
        of_parameters, of_statistics = shape[-2:] if own_parameters else shape[-1:], shape[:-1]
        if modulations and own_parameters:
            return False
    try:
        check_dropout(dropout, seed)
        check_gate(gate, residual)
        if modulations and op != "group_norm":
            count_samples(tuple(shape), modulations)
    except KernelInputError:
        return False
    return (
        is_laid_out
        and x.numel() > 0
        and is_valid_eps(eps)
        and is_valid_activation(activation, negative_slope)
        and is_valid_offset(weight_offset, weight)
        and has_float_tensors(shape, x, residual, *like_x.values())
        and has_float_tensors(of_parameters, weight, bias)
        and all(has_float_tensors(each.shape, each) for each in modulations.values())
        and has_float_tensors(of_statistics, mean, rstd)
        and all(each is None or each.dtype == torch.float32 for each in (mean, rstd))
    )


def _is_reference_faster(arguments: dict[str, Any]) -> bool:
    """Return whether the reference takes less time for a call than `batch_invariant`.

    It does for small calls without dropout: with parameters for each head, or with gradients of scale and
    shift.  It takes half the time for a backward pass with parameters for each head.
    """
    if arguments["x"].numel() > _SMALL_ELEMENTS or arguments["dropout"]:
        return False
    if has_heads(arguments["weight"], arguments.get("bias")):
        return True
    return "dy" in arguments and not (arguments.get("scale") is arguments.get("shift") is None)


def _convert_arguments_for_batch_invariant(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert the tensors of a call to the shapes and layouts that `batch_invariant` takes."""
    x, prepared = arguments["x"], dict(arguments)
    if op == "group_norm":
        channels_last = not x.is_contiguous()
        for name in _LIKE_X:
            if prepared.get(name) is not None:
                prepared[name] = convert_to_layout(prepared[name], channels_last)
        return prepared
    modulations = select_modulations(*(arguments.get(name) for name in _GRADIENTS_OF_SAMPLES.values()))
    # The axes after the first: [tokens, cols] of a sample, [heads, cols] or [cols].
    of_row: Sequence[int]
    if modulations:
        samples, *of_row = compute_sample_shape(x, modulations)
        prepared |= {name: each.reshape(samples, -1) for name, each in modulations.items()}
    else:
        of_row = x.shape[-2:] if has_heads(arguments["weight"], arguments.get("bias")) else x.shape[-1:]
    count = x.numel() // math.prod(of_row)
    for names, shape in ((_LIKE_X, (count, *of_row)), (_STATISTICS, (count, *of_row[:-1]))):
        for name in names:
            tensor = prepared.get(name)
            if tensor is not None and not (tensor.shape == shape and tensor.is_contiguous()):
                prepared[name] = tensor.reshape(shape).contiguous()
    return prepared


def _restore_results(op: str, arguments: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Convert results of `batch_invariant` to the shapes and the layout of a call's tensors, in `results` itself.

    No result is a view, since torch would not change a view in place.
    """
    x, is_rows = arguments["x"], op != "group_norm"
    for name, result in results.items():
        if result is None:
            continue
        if name in _LIKE_X:
            result = result.view(x.shape) if is_rows else convert_to_layout(result, not x.is_contiguous())
        elif name in _STATISTICS and is_rows:
            result = result.view(x.shape[:-1])
        elif name in _GRADIENTS_OF_SAMPLES:
            result = result.view(arguments[_GRADIENTS_OF_SAMPLES[name]].shape)
        results[name] = result.new_empty(0).set_(result) if result._is_view() else result
    return results
