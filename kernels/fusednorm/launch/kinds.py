"""The key that distinguishes calls of a pass: all that checks, plan and compiler depend on; not addresses."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fusednorm.policy.batch_invariance import is_batch_invariant
from fusednorm.policy.waiting import may_wait

Inputs = tuple[Tensor | None, ...]
Options = tuple[Hashable, ...]


def kind_of(whose: Hashable, inputs: Inputs, options: Options) -> Hashable:
    """What tells a call of a pass from others.

    Raises:
        TypeError: an option has no hash, once the kind is looked for.
    """
    kind: list[Hashable] = [whose, may_wait(), is_batch_invariant(), options]
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.is_neg())
    return tuple(kind)


def kind_of_any_rows(
    whose: Hashable, like_x: int, of_rows: int, inputs: Inputs, options: Options
) -> Hashable | None:
    """What tells a call of a pass but for its number of rows; None where that is part of how the rows lie.

    Args:
        like_x: as many inputs, x first, have x's shape; 0 where calls differ by more than their number of rows.
        of_rows: from there to here they have that of x's rows.
    """
    x: Any = inputs[0]
    shape = x.shape
    if not (like_x and shape):
        return None
    kind: list[Hashable] = [whose, may_wait(), is_batch_invariant(), options, shape[-1]]
    for tensor in inputs[:like_x]:
        if tensor is None:
            kind.append(None)
            continue
        # A single row is contiguous, wherever the next one would be.
        strides: Any = tensor.is_contiguous()
        if not strides:
            if len(shape) != 2:
                return None
            strides = tensor.stride()
        fits = tensor is x or tensor.shape == shape
        kind += (tensor.dtype, fits, strides, tensor.get_device(), tensor.is_neg())
    for tensor in inputs[like_x:of_rows]:
        if tensor is None:
            kind.append(None)
        else:
            fits = tensor.is_contiguous() and tensor.shape == shape[:-1]
            kind += (tensor.dtype, fits, tensor.get_device(), tensor.is_neg())
    for tensor in inputs[of_rows:]:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.get_device(), tensor.is_neg())
    return tuple(kind)
