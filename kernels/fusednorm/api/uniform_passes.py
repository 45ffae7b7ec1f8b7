"""The passes of `layer_norm`, `rms_norm` and `group_norm` with one common signature.

The library is a module with `<op>_forward` and `<op>_backward` like the launchers; `fusednorm.cpu` and
`fusednorm.reference` are such modules.  Arguments that the pass of an operation does not have are ignored.
Tensors whose strides the launchers do not support are copied.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm.arguments.arrays import merge_axes
from fusednorm.arguments.checks import (
    MAX_HEADS,
    check_gate,
    check_groups,
    check_weight_offset,
    count_samples,
    has_heads,
    select_modulations,
)
from fusednorm.arguments.inputs import (
    ROLES,
    BackwardInputs,
    NormInputs,
    ShapeRole,
    group_names_by_role,
    has_own_gradient,
)
from fusednorm.arguments.operator_arguments import list_operator_arguments
from fusednorm.arguments.options import NormOptions, collect_arguments
from fusednorm.reference.checks import check_float, check_optional_tensor
from fusednorm.results import Backward, Forward
from fusednorm.tensors.layouts import convert_to_layout, has_channel_rows, is_in_layout, suggests_channels_last

Inputs = TypeVar("Inputs", NormInputs, BackwardInputs)

_MAX_COLS_OF_HEADS = 8192
"""The longest rows that both passes support in every dtype if they need two strides."""


def run_forward(library: Any, options: NormOptions, inputs: NormInputs, *, stats: bool = False) -> Forward:
    """Call the function of the module `library` for an operation's forward pass, with inputs of any strides.

    The module `library` has functions `<op>_forward` and `<op>_backward`.  Tensors with strides that these
    do not support are copied.
    """
    op = options.op
    if _has_empty_rows(options, inputs.x):
        return _run_empty_forward(options, inputs)
    run: Callable[..., Forward] = getattr(library, f"{op}_forward")
    return run(
        **collect_arguments(op, _copy_inputs_with_unsupported_strides(options, inputs), options), stats=stats
    )


def run_backward(
    library: Any, options: NormOptions, inputs: BackwardInputs, *, parameter_gradients: bool = True
) -> Backward:
    """Call the function of the module `library` for an operation's backward pass, with inputs of any strides.

    The module `library` has functions `<op>_forward` and `<op>_backward`.  Tensors with strides that these
    do not support are copied.
    """
    op = options.op
    if _has_empty_rows(options, inputs.x):
        return _run_empty_backward(options, inputs)
    run: Callable[..., Backward] = getattr(library, f"{op}_backward")
    arguments = collect_arguments(op, _copy_inputs_with_unsupported_strides(options, inputs), options)
    return run(**arguments, parameter_gradients=parameter_gradients)


def run_backward_operator(options: NormOptions, inputs: BackwardInputs) -> Backward:
    """Run an operation's backward pass by its operator in `torch.ops.fusednorm`, which torch can trace.

    The placeholders that the operator returns become None, or dx as the gradient of the residual.
    """
    op = options.op
    run = getattr(torch.ops.fusednorm, f"{op}_backward")
    results = run(*list_operator_arguments(inputs, options.operator_arguments))
    # The operator returns tensors also where there is no gradient.
    given = zip(inputs.forward_inputs, results, strict=True)
    gradients = Backward._make([None if tensor is None else result for tensor, result in given])
    if inputs.residual is not None and not has_own_gradient(op, inputs):
        return gradients._replace(dresidual=gradients.dx)
    return gradients


def compute_input_gradients(
    run: Callable[[BackwardInputs], Backward],
    saved: tuple[Any, ...],
    dy: Tensor | None,
    dresidual_out: Tensor | None,
) -> Backward:
    """Compute the gradients of a forward pass's inputs by the backward pass `run`, in the inputs' dtypes.

    `saved` is the inputs of the forward pass, then mean and rstd.  A dy of None is zero.
    """
    x, _, _, residual, *_ = saved
    dy = torch.zeros_like(x) if dy is None else dy
    inputs = BackwardInputs._make((*saved, dy, None if residual is None else dresidual_out))
    result = run(inputs)
    if result.dresidual is not None and result.dresidual.dtype != residual.dtype:
        return result._replace(dresidual=result.dresidual.to(residual.dtype))
    return result


def _copy_inputs_with_unsupported_strides(options: NormOptions, inputs: Inputs) -> Inputs:
    """Return the inputs, with copies of those whose strides a pass would not support."""
    strided = [name for name, t in zip(inputs._fields, inputs, strict=True) if not (t is None or t.is_contiguous())]
    if not strided:
        return inputs
    like_x, _, _, of_samples = group_names_by_role(inputs._fields)
    made: dict[str, Any] = inputs._asdict()
    for name in strided:
        if name not in like_x and name not in of_samples:
            made[name] = made[name].contiguous()
    tensors = [made[name] for name in like_x]
    if options.layout is not None:
        tensors = _copy_to_one_layout(*tensors)
    else:
        modulated = options.op != "group_norm" and any(made[name] is not None for name in of_samples)
        tensors = copy_unsupported_strides(options.op, *tensors, modulated=modulated)
    made.update(zip(like_x, tensors, strict=True))
    made.update(zip(of_samples, _unify_strides([made[name] for name in of_samples]), strict=True))
    return type(inputs)(*made.values())


def copy_unsupported_strides(op: str, x: Tensor, *others: Tensor | None, modulated: bool = False) -> list[Any]:
    """Return x and tensors of x's shape, with copies of those whose strides a pass would not support.

    A copy of x [N, C, *spatial] has the memory format that torch suggests for x's strides, as in torch's own
    function; copies of the other tensors have x's layout.  `modulated`: whether rows have a scale, shift or gate
    of each sample; their passes need one constant stride between all rows.
    """
    if op != "group_norm":
        tensors = [x, *others]
        for tensor in tensors:
            if tensor is not None and not tensor.is_contiguous() and not _has_uniform_rows(tensor):
                keeps = _is_contiguous_or_uniform if modulated else _has_contiguous_heads
                return [t if t is None or keeps(t) else t.contiguous() for t in tensors]
        return tensors
    if not _has_sample_layout(x):
        x = convert_to_layout(x, suggests_channels_last(x))
    channels_last = not x.is_contiguous()
    return [x, *(t if t is None or _has_sample_layout(t) else convert_to_layout(t, channels_last) for t in others)]


def _copy_to_one_layout(x: Tensor, *others: Tensor | None) -> list[Any]:
    """Return x [N, C, *spatial] and tensors of its shape, all contiguous or all with rows of channels.

    x is copied if it is neither, to the memory format that torch suggests for its strides; the others, if they have
    not x's layout.
    """
    if x.dim() < 2:
        return [x, *others]
    has_rows = has_channel_rows(x)
    if not (has_rows or x.is_contiguous()):
        has_rows = suggests_channels_last(x)
        x = convert_to_layout(x, has_rows)
    has_layout = has_channel_rows if has_rows else Tensor.is_contiguous
    return [x, *(t if t is None or has_layout(t) else convert_to_layout(t, has_rows) for t in others)]


def _has_empty_rows(options: NormOptions, x: Tensor) -> bool:
    """Return whether each row or group of x is empty, which torch supports but no launcher does."""
    if options.layout is not None:
        return x.numel() == 0 and 0 in x.shape[1:2]
    return x.numel() == 0 and 0 in (x.shape[2:] if options.op == "group_norm" else x.shape[-1:])


def _run_empty_forward(options: NormOptions, inputs: NormInputs) -> Forward:
    """Return the results of a forward pass over rows or groups without elements, which no kernel supports.

    The arguments are checked as usual.  mean is 0, and rstd NaN.
    """
    options = options.validate()
    x, residual = inputs.x, inputs.residual
    check_float("x", x)
    check_gate(inputs.gate, residual)
    if options.op == "group_norm":
        check_groups(x.new_empty((*x.shape[:2], 1)), options.num_groups)
        of_parameters, of_statistics = x.shape[1:2], torch.Size((x.shape[0], options.num_groups))
    elif options.layout is not None:
        check_weight_offset(options.weight_offset, inputs.weight)
        of_parameters, of_statistics = x.shape[1:2], torch.Size((x.shape[0], *x.shape[2:]))
    else:
        check_weight_offset(options.weight_offset, inputs.weight)
        of_parameters = x.shape[-2 if has_heads(inputs.weight, inputs.bias) else -1 :]
        of_statistics = x.shape[:-1]
        modulations = select_modulations(inputs.scale, inputs.shift, inputs.gate)
        if modulations:
            count_samples(tuple(x.shape), modulations)
    shapes: dict[ShapeRole, Any] = {ShapeRole.LIKE_X: None, ShapeRole.PARAMETER: of_parameters}
    has_channels = options.op == "group_norm" or options.layout is not None
    shapes[ShapeRole.PER_SAMPLE] = x.shape[:2] if has_channels else None
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        shape = shapes[ROLES[name]]
        if shape is None and ROLES[name] is ShapeRole.PER_SAMPLE and tensor is not None:
            shape = tensor.shape
        check_optional_tensor(name, tensor, x, shape)
    rstd = x.new_full(of_statistics, math.nan, dtype=torch.promote_types(x.dtype, torch.float32))
    mean = None if options.is_rms else torch.zeros_like(rstd)
    if residual is not None and options.op == "group_norm":
        residual = x
    return Forward(torch.empty_like(x), mean, rstd, None if residual is None else torch.empty_like(residual))


def _run_empty_backward(options: NormOptions, inputs: BackwardInputs) -> Backward:
    """Return the gradients of a backward pass over rows or groups without elements: zero, or empty."""
    made = [None if tensor is None else tensor.new_zeros(tensor.shape) for tensor in inputs.forward_inputs]
    x, residual = inputs.x, inputs.residual
    dx = torch.empty_like(x)
    dresidual = None if residual is None else dx
    if residual is not None and has_own_gradient(options.op, inputs):
        dresidual = torch.empty_like(residual)
    return Backward._make(made)._replace(dx=dx, dresidual=dresidual)


def _has_sample_layout(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() > 2 and is_in_layout(x, True))


def _has_uniform_rows(tensor: Tensor) -> bool:
    """Return whether a non-contiguous [..., cols] has rows of contiguous elements, one constant stride apart."""
    *strides, last = tensor.stride()
    return last == 1 and merge_axes(tensor.shape[:-1], tuple(strides)) is not None


def _is_contiguous_or_uniform(tensor: Tensor) -> bool:
    """Return whether [..., cols] has rows of contiguous elements, one constant stride apart."""
    return tensor.is_contiguous() or _has_uniform_rows(tensor)


def _has_contiguous_heads(tensor: Tensor) -> bool:
    """Return whether each token [heads, cols] is contiguous, and tokens are one constant stride apart.

    Return False, too, if the tensor has more heads or columns than the passes support with two strides.
    """
    if tensor.is_contiguous():
        return True
    if tensor.dim() < 3:
        return False
    cols = tensor.shape[-1]
    if tensor.stride()[-2:] != (cols, 1):
        return False
    if cols > _MAX_COLS_OF_HEADS or tensor.shape[-2] > MAX_HEADS:
        return False
    return merge_axes(tensor.shape[:-2], tensor.stride()[:-2]) is not None


def _unify_strides(modulations: list[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors of each sample with contiguous rows and one common stride between samples.

    All are copied unless they already have such strides.
    """
    given = [each for each in modulations if each is not None]
    if all(each.stride() == given[0].stride() and _is_contiguous_or_uniform(each) for each in given):
        return modulations
    return [None if each is None else each.contiguous() for each in modulations]
