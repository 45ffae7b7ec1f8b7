"""The key that distinguishes calls of a pass: all that checks, plan and compiler depend on, without addresses."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fusednorm.policy.batch_invariance import is_batch_invariant
from fusednorm.policy.waiting import may_wait

Inputs = tuple[Tensor | None, ...]
Options = tuple[Hashable, ...]


def kind_of(whose: Hashable, inputs: Inputs, options: Options) -> Hashable:
    """The key of a call of a pass.

    Raises:
        TypeError: an option has no hash; raised when the key is first looked up.
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
    """The key of a call without its number of rows; None if the memory layout of the rows depends on that number.

    Args:
        like_x: the first `like_x` inputs, x first, have x's shape; 0 if calls differ by more than their number
            of rows.
        of_rows: inputs from `like_x` to `of_rows` have x's shape without the last axis.
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
        # A single row is contiguous for any stride between rows.
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
