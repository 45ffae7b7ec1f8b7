"""Runs of a norm's own forward on tensors without data, to see whether it chooses its steps by the sizes of x.

Samples with data cannot show that: rows of some thousand columns at as many positions take a lot of memory.
"""

import warnings
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusednorm.api.patching.forward_probes import copy_with_parameters, get_own_attributes
from fusednorm.api.patching.norm_formulas import NormFormula

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137)
"""Sizes of axes; an integer in a forward's steps that one of them divides was computed from sizes."""

_Shape = tuple[int, ...]


class TracedStep(NamedTuple):
    """A call of one of torch's functions that returned a tensor.

    Attributes:
        function: the function; None for the end of the forward.
        arguments: the arguments and the result, tensors replaced by their numbers.
    """

    function: Any
    arguments: Any


def find_deciding_shape(
    module: nn.Module, formula: NormFormula, rank: int, size: _Shape, training: bool
) -> _Shape | None:
    """Find a shape of x for which a norm's forward takes other steps than for usual sizes; None if there is none.

    The axes that are not normalised get unusual sizes, one axis after the other: 1, those of the parameters, and
    the integers among the module's attributes.  Shapes for which the forward raises an error are left out.

    Args:
        module: a norm whose results on samples agree with the formula.
        formula: that formula.
        rank: the number of axes of x, for which the formula has a shape.
        size: the shape of the module's parameters, or the one that they could have.
        training: whether the forward runs in training mode.

    Raises:
        Exception: any exception of the forward with usual sizes, for example because a step needs data.
    """
    unusual = {1, *size, *_iterate_integers(get_own_attributes(module).values())}
    usual = tuple(prime for prime in _PRIMES if prime not in unusual)[: rank - len(size)]
    free_sizes = usual, *_iterate_free_sizes(usual, unusual)
    shapes = [shape for each in free_sizes if (shape := formula.make_sample_shape(rank, size, each)) is not None]
    expected = trace_forward(module, shapes[0], training)
    for shape in shapes[1:]:
        try:
            found = trace_forward(module, shape, training)
        except Exception:
            continue
        if not all(_is_same_step(step, other, usual) for step, other in zip_longest(expected, found)):
            return shape
    return None


def trace_forward(module: nn.Module, shape: _Shape, training: bool) -> list[TracedStep]:
    """Run the forward of a module's class on an x without data, and return its steps.

    Raises:
        Exception: any exception of the forward.
    """
    parameters = {
        name: torch.empty(p.shape, device="meta", dtype=torch.float32)
        for name, p in module._parameters.items()
        if p is not None
    }
    copied = copy_with_parameters(module, parameters, training)
    recorder = _StepRecorder()
    with torch.no_grad(), recorder, warnings.catch_warnings(action="ignore"):
        y = type(copied).forward(copied, torch.empty(shape, device="meta", dtype=torch.float32))
    return [*recorder.steps, TracedStep(None, recorder.number_tensors((y, y.shape == shape)))]


class _StepRecorder(TorchFunctionMode):
    """Mode that records the calls of torch's functions which return tensors.

    Tensors say that they are on the CPU, because some functions that take a device do not know the meta device.
    A forward that creates a tensor on the device of another, or moves one there, gets a tensor on meta.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[TracedStep] = []
        # All tensors are kept, so that no two of them have the same id.
        self._tensors: dict[int, tuple[int, Tensor]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(map(_replace_device, args))
        kwargs = {name: _replace_device(value) for name, value in (kwargs or {}).items()}
        result = function(*args, **kwargs)
        if isinstance(result, torch.device):
            return torch.device("cpu")
        if isinstance(result, Tensor):
            self.steps.append(TracedStep(function, self.number_tensors((args, kwargs, result))))
        return result

    def number_tensors(self, value: Any) -> Any:
        """Return arguments as nested tuples, each tensor replaced by a text with its number."""
        if isinstance(value, Tensor):
            number, _ = self._tensors.setdefault(id(value), (len(self._tensors), value))
            return f"tensor {number}"
        if isinstance(value, dict):
            value = tuple(value.items())
        if isinstance(value, list | tuple):
            return tuple(map(self.number_tensors, value))
        if isinstance(value, slice):
            return value.start, value.stop, value.step
        return value


def _replace_device(argument: Any) -> Any:
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _iterate_free_sizes(usual: _Shape, unusual: Iterable[int]) -> Iterator[_Shape]:
    """Yield sizes for the axes that are not normalised: some or all of them unusual, or all equal."""
    yield (usual[0],) * len(usual)
    yield (1,) * len(usual)
    for size in sorted(unusual):
        for axis in range(len(usual)):
            yield (*usual[:axis], size, *usual[axis + 1 :])


def _iterate_integers(values: Iterable[Any]) -> Iterator[int]:
    """Yield the positive integers among values and in their lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _iterate_integers(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def _is_same_step(step: TracedStep | None, other: TracedStep | None, usual: _Shape) -> bool:
    """Return whether two steps differ at most in integers that were computed from the usual sizes."""
    return (
        step is not None
        and other is not None
        and step.function is other.function
        and _are_same_arguments(step.arguments, other.arguments, usual)
    )


def _are_same_arguments(one: Any, other: Any, usual: _Shape) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            _are_same_arguments(*each, usual) for each in zip(one, other, strict=True)
        )
    if type(one) is int and type(other) is int:
        return one == other or any(one % size == 0 for size in usual)
    return bool(one == other)
