"""The key that distinguishes calls of a pass: all that checks, plan and compiler depend on, without addresses."""

from collections.abc import Hashable
from itertools import zip_longest
from typing import Any

from torch import Tensor

from fusednorm.arguments.inputs import ShapeRole
from fusednorm.policy.batch_invariance import is_batch_invariant
from fusednorm.policy.cooperative_launches import may_wait

Inputs = tuple[Tensor | None, ...]
Options = tuple[Hashable, ...]
_LIKE_X, _OF_ROWS = ShapeRole.LIKE_X, ShapeRole.PER_ROW


def make_call_key(whose: Hashable, inputs: Inputs, options: Options) -> Hashable:
    """Make the key of a call of a pass.

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


def make_row_free_key(
    whose: Hashable, roles: tuple[ShapeRole, ...], inputs: Inputs, options: Options
) -> Hashable | None:
    """Make the key of a call without its number of rows.

    The result is None if the memory layout of the rows depends on that number.

    Args:
        roles: the roles of the inputs, x first; those beyond are parameters.  Empty if calls differ by more than
            their number of rows.
    """
    x: Any = inputs[0]
    shape = x.shape
    if not (roles and shape):
        return None
    kind: list[Hashable] = [whose, may_wait(), is_batch_invariant(), options, shape[-1]]
    for role, tensor in zip_longest(roles, inputs):
        if tensor is None:
            kind.append(None)
        elif role is _LIKE_X:
            # A single row is contiguous for any stride between rows.
            strides: Any = tensor.is_contiguous()
            if not strides:
                if len(shape) != 2:
                    return None
                strides = tensor.stride()
            fits = tensor is x or tensor.shape == shape
            kind += (tensor.dtype, fits, strides, tensor.get_device(), tensor.is_neg())
        elif role is _OF_ROWS:
            fits = tensor.is_contiguous() and tensor.shape == shape[:-1]
            kind += (tensor.dtype, fits, tensor.get_device(), tensor.is_neg())
        else:
            kind += (tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.get_device(), tensor.is_neg())
    return tuple(kind)
