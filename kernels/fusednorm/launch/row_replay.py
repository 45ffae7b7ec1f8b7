"""Forward calls of LayerNorm and RMSNorm with nothing new about them: no check, no plan, one launch.

A call is told by all that its checks, its plan and the compiler look at, except for the number of rows and the
addresses.  The first of a kind goes the long way; if rows enter its one launch by a rule and all its tensors are
aligned, what is left to do for the next of the kind is kept here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm.launch import prepared
from fusednorm.launch.launch import ByRows, Launch
from fusednorm.launch.repeats import current_device, keep
from fusednorm.outputs import is_room_for
from fusednorm.policy.waiting import may_wait
from fusednorm.results import Forward

_TENSORS = 8
"""The first arguments of a forward kernel: x, residual, weight, bias, y, residual_out, mean, rstd."""


Options = tuple[float, float, str, torch.dtype | None, bool, bool]
"""What tells a call besides its tensors: eps, weight_offset, activation, out_dtype, stats and is_rms."""


@dataclass(frozen=True, slots=True)
class _Repeat:
    """What a call of a known kind has to do.

    Attributes:
        kernel: what to launch.
        device: where, by its index.
        by_rows: how the launch follows from the number of rows.
        arguments: the kernel's after the tensors, and after the number of rows where that is one.
        like_x: whether y has x's dtype and strides.
        y, statistics: tensors of no elements, which those of a call are made from.
    """

    kernel: prepared.Prepared
    device: int
    by_rows: ByRows
    arguments: tuple[Any, ...]
    like_x: bool
    y: Tensor
    statistics: Tensor


# A named tuple's own constructor is written in Python.
_as_forward = tuple.__new__

_NONE_GIVEN = (None,) * len(Forward._fields)

_KNOWN: dict[tuple[Any, ...], _Repeat] = {}


def forward_again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Options,
    out: Forward | None = None,
) -> Forward | None:
    """The result of a call without dropout, or None unless its kind is known and `out` fits."""
    shape = x.shape
    try:
        known = _KNOWN.get(_kind(x, shape, weight, bias, residual, options))
    except TypeError:  # An option without a hash; checks know better what is wrong with it.
        return None
    if known is None or not prepared.undisturbed():
        return None
    if residual is not None and residual.shape != shape:
        return None
    *leading, cols = shape
    rows = x.numel() // cols
    if not rows:
        return None
    device = known.device
    if current_device() != device:
        with torch.cuda.device(device):
            return forward_again(x, weight, bias, residual, options, out)

    _, _, _, _, stats, is_rms = options
    y, mean, rstd, residual_out, scale = out or _NONE_GIVEN
    if out is not None:
        of_rows, float32 = x.shape[:-1], torch.float32
        if scale is not None or not (
            _may_take(y, True, x, shape, known.y.dtype)
            and _may_take(mean, stats and not is_rms, x, of_rows, float32)
            and _may_take(rstd, stats, x, of_rows, float32)
            and _may_take(
                residual_out, residual is not None, x, shape, x.dtype if residual is None else residual.dtype
            )
        ):
            return None
    if y is None:
        # Sizes one by one: torch reads a tuple of them several times slower.
        y = torch.empty_like(x) if known.like_x else known.y.new_empty(*shape)
    x_at, y_at = x.data_ptr(), y.data_ptr()
    weight_at = 0 if weight is None else weight.data_ptr()
    bias_at = 0 if bias is None else bias.data_ptr()
    addresses = x_at | weight_at | bias_at | y_at
    residual_at = residual_out_at = mean_at = rstd_at = 0
    if residual is not None:
        if residual_out is None:
            residual_out = residual.new_empty(*shape)
        residual_at, residual_out_at = residual.data_ptr(), residual_out.data_ptr()
        addresses |= residual_at | residual_out_at
    if stats:
        if rstd is None:
            rstd = known.statistics.new_empty(*leading) if leading else known.statistics.new_empty(())
        rstd_at = rstd.data_ptr()
        if not is_rms:
            if mean is None:
                mean = torch.empty_like(rstd)
            mean_at = mean.data_ptr()
        addresses |= mean_at | rstd_at
    if addresses % 16:
        return None

    kernel, by_rows, arguments = known.kernel, known.by_rows, known.arguments
    programs = -(-rows // by_rows.tile)
    if programs > by_rows.most:
        programs = by_rows.most
    if by_rows.argument:
        arguments = (rows, *arguments)
    call, head, packed = kernel.launcher
    stream = kernel.stream_of(device)
    # A parameter that was None at the compile is no parameter of the compiled kernel: its zero goes nowhere.
    if packed:
        parameters = (
            x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, mean_at, rstd_at, *arguments
        )  # fmt: skip
        call(programs, 1, 1, stream, *head, parameters)
    else:
        call(
            programs, 1, 1, stream, *head,
            x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, mean_at, rstd_at, *arguments,
        )  # fmt: skip
    return _as_forward(Forward, (y, mean, rstd, residual_out, None))


def remember(
    launches: list[Launch],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Options,
) -> None:
    """Keep what `forward_again` needs of a call that was checked, planned and has just been launched."""
    launch = launches[0]
    if launch.by_rows is None or not all(_is_plain(tensor) for tensor in (x, residual)):
        return
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in launch.arguments[:_TENSORS]):
        return
    kernel = prepared.find(launch.kernel, launch.arguments, launch.options, x.get_device())
    if kernel is None:
        return
    fixed = launch.arguments[_TENSORS + launch.by_rows.argument :] + kernel.constants
    repeat = _Repeat(
        kernel=kernel,
        device=x.get_device(),
        by_rows=launch.by_rows,
        arguments=fixed,
        like_x=options[3] in (None, x.dtype) and x.ndim == 2 and x.stride() == (x.shape[1], 1),
        y=x.new_empty(0, dtype=options[3]),
        statistics=x.new_empty(0, dtype=torch.float32),
    )
    keep(_KNOWN, _kind(x, x.shape, weight, bias, residual, options), repeat)


def _kind(
    x: Tensor,
    shape: torch.Size,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    cols = shape[-1] if shape else 0
    strides: Any = x.stride()
    # The stride from row to row means nothing to a single row; nor do most strides to a contiguous tensor.
    if len(shape) != 2 or (shape[0] == 1 and strides[0] != cols):
        strides = x.is_contiguous()
    return (
        x.dtype,
        x.device,
        cols,
        strides,
        x.is_neg(),
        weight is None or (weight.dtype, weight.device, weight.shape, weight.is_contiguous(), weight.is_neg()),
        bias is None or (bias.dtype, bias.device, bias.shape, bias.is_contiguous(), bias.is_neg()),
        residual is None
        or (residual.dtype, residual.device, residual.is_contiguous() or residual.stride(), residual.is_neg()),
        options,
        may_wait(),
    )


def _may_take(given: Tensor | None, wanted: bool, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a result, if there is one, can go where the caller wants it."""
    return given is None or (wanted and is_room_for(given, shape, dtype, x.device))


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether the dtype, the last axis and, where it is not contiguous, the strides say how its rows lie."""
    return tensor is None or tensor.is_contiguous() or tensor.ndim == 2
