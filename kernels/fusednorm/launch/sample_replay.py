"""Calls of GroupNorm with nothing new about them, both passes: no check, no plan, and one workspace.

A call is told by all that its checks, its plan and the compiler look at, which is everything but addresses.  The
first of a kind goes the long way.  If its tensors are aligned, what is left to do for the next is kept here: room
for its results, and the recipe of its launches.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm.launch import prepared
from fusednorm.launch.launch import Launch
from fusednorm.launch.recipes import Recipe
from fusednorm.launch.repeats import current_device, keep
from fusednorm.policy.batch_invariance import is_batch_invariant
from fusednorm.policy.waiting import may_wait
from fusednorm.results import Backward, Forward

Made = TypeVar("Made", Forward, Backward)

Inputs = tuple[Tensor, *tuple[Tensor | None, ...]]
"""x first, then whatever else may come with it, in an order of the pass."""

ForwardOptions = tuple[int, float, str, torch.dtype | None, bool]
"""What tells a forward call besides its tensors: num_groups, eps, activation, out_dtype and stats."""

BackwardOptions = tuple[int, float, str]
"""What tells a backward call besides its tensors: num_groups, eps and activation."""

Options = ForwardOptions | BackwardOptions

_AS_X = ("y", "residual_out", "dx")
"""Results that are laid out as x; the others are contiguous."""

_DRESIDUAL = Backward._fields.index("dresidual")

# A named tuple's own constructor is written in Python.
_as_result: Any = tuple.__new__


@dataclass(frozen=True, slots=True)
class _Room:
    """How a result is allocated, and what may be written to in its place.

    Attributes:
        as_x: whether it is laid out as x, else contiguous.
        shape, strides, dtype: of the result.
        empty: a tensor of no elements of that dtype, on x's device.
    """

    as_x: bool
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    empty: Tensor

    @classmethod
    def of(cls, name: str, result: Tensor) -> "_Room":
        return cls(name in _AS_X, result.shape, result.stride(), result.dtype, result.new_empty(0))

    def new(self, x: Tensor) -> Tensor:
        if not self.as_x:
            # Sizes one by one: torch reads a tuple of them several times slower.
            return self.empty.new_empty(*self.shape)
        return torch.empty_like(x) if x.dtype == self.dtype else torch.empty_like(x, dtype=self.dtype)

    def fits(self, given: Tensor, x: Tensor) -> bool:
        return (
            given.dtype == self.dtype
            and given.shape == self.shape
            and given.stride() == self.strides
            and given.device == x.device
            and not given.is_neg()
        )


@dataclass(frozen=True, slots=True)
class _Repeat:
    """What a call of a known kind has to do.

    Attributes:
        results: for each field of the result its room, or None; dresidual, which is dx, has none.
        has_dresidual: whether dx is dresidual, too.
        recipe: its launches over the tensors that came and the results.
    """

    results: tuple[_Room | None, ...]
    has_dresidual: bool
    recipe: Recipe


_KNOWN: dict[tuple[Any, ...], _Repeat] = {}


def again(made: type[Made], inputs: Inputs, options: Options, out: Made | None = None) -> Made | None:
    """The result of a call without dropout, or None unless its kind is known and `out` fits."""
    try:
        known = _KNOWN.get(_kind(made, inputs, options))
    except TypeError:  # An option without a hash; checks know better what is wrong with it.
        return None
    if known is None or not prepared.undisturbed():
        return None
    device = known.recipe.index
    if current_device() != device:
        with torch.cuda.device(device):
            return again(made, inputs, options, out)
    results = _results(known, inputs[0], out)
    if results is None:
        return None
    at = [tensor.data_ptr() for tensor in inputs if tensor is not None]
    at += [tensor.data_ptr() for tensor in results if tensor is not None]
    if not known.recipe.launch(at):
        return None
    if known.has_dresidual:
        results[_DRESIDUAL] = results[0]
    result: Made = _as_result(made, results)
    return result


def remember(launches: list[Launch], result: Forward | Backward, inputs: Inputs, options: Options) -> None:
    """Keep what `again` needs of a call that was checked, planned and has just been launched."""
    has_dresidual = isinstance(result, Backward) and result.dresidual is not None
    results = [None if name == "dresidual" else tensor for name, tensor in result._asdict().items()]
    recipe = Recipe.of(launches, tuple(tensor for tensor in (*inputs, *results) if tensor is not None))
    if recipe is None:
        return
    rooms = tuple(
        None if tensor is None else _Room.of(name, tensor)
        for name, tensor in zip(result._fields, results, strict=True)
    )
    keep(_KNOWN, _kind(type(result), inputs, options), _Repeat(rooms, has_dresidual, recipe))


def _kind(made: type[Forward] | type[Backward], inputs: Inputs, options: Options) -> tuple[Any, ...]:
    kind: list[Any] = [made, may_wait(), is_batch_invariant(), options]
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_neg())
    return tuple(kind)


def _results(known: _Repeat, x: Tensor, out: Forward | Backward | None) -> list[Tensor | None] | None:
    """Tensors for the results, those in `out` where it has some; None where one of these does not fit."""
    if out is None:
        results = [None if room is None else room.new(x) for room in known.results]
    else:
        results = []
        for room, given in zip(known.results, out, strict=True):
            if given is None:
                results.append(None if room is None else room.new(x))
            elif room is not None and room.fits(given, x):
                results.append(given)
            else:
                return None
    return results
