"""Repeated calls without checks and planning: they repeat the launches of the first call of their kind.

The kind of a call is the pass, its options, the process's policy, and everything in its tensors that checks, plan
and compiler depend on, which is all but their addresses.  The first call of a kind is checked and planned.  If its
tensors are aligned, the remaining work for later calls is stored: how results are allocated, and the recipe of the
launches.

If the launches declare how they depend on the number of rows, calls with any number of rows are of one kind.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from threading import Lock
from typing import Any, Generic

import torch
from torch import Tensor

from fusednorm.arguments.arrays import contiguous_strides
from fusednorm.arguments.inputs import ShapeRole
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.launch import prepared_kernels
from fusednorm.launch.extension_calls import describe_call, load_extension
from fusednorm.launch.launch_template import LaunchTemplate
from fusednorm.launch.launches import Launch
from fusednorm.policy.batch_invariance import is_batch_invariant
from fusednorm.policy.cooperative_launches import may_wait
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import TORCH_DTYPES
from fusednorm.tensors.outputs import Result, can_hold_result

Inputs = tuple[Tensor | None, ...]
Options = tuple[Hashable, ...]
_LIKE_X, _OF_ROWS = ShapeRole.LIKE_X, ShapeRole.PER_ROW

MAX_KINDS = 4096
"""The most kinds of calls that are kept; the oldest is dropped, and recorded again at its next call."""

_LOOK_EVERY = 256
"""Replays by Python between two searches for the host extension; a search costs about as much as one replay."""

# Without torch's check that CUDA is initialised: a CUDA tensor exists already.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

Allocate = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
"""A function that allocates a result from x, x's shape, and that shape without its last axis."""


@dataclass(frozen=True, slots=True)
class _CallReplay:
    """Everything that is needed to repeat a recorded call: how its results are allocated, and its launches.

    Attributes:
        allocators: for each field of the result with a tensor of its own, the function that allocates it.
        outputs: the `OutputSpec` of each of these fields, which checks a tensor of the caller.
        shared_fields: pairs of a field and the other field whose tensor it shares.
        template: the call's launches over inputs and results.
    """

    allocators: tuple[Allocate | None, ...]
    outputs: Outputs
    shared_fields: tuple[tuple[int, int], ...]
    template: LaunchTemplate

    def try_allocate_missing(
        self, out: Forward | Backward, x: Tensor, shape: Sequence[int], rows_shape: Sequence[int]
    ) -> list[Tensor | None] | None:
        """Return a tensor for each result: that in `out`, or a new one; None if one in `out` does not fit.

        Return None if a tensor in `out` has another dtype, shape, layout or device than the result.
        """
        results: list[Tensor | None] = []
        for new, output, given in zip(self.allocators, self.outputs, out, strict=True):
            if given is None:
                results.append(None if new is None else new(x, shape, rows_shape))
            elif output is not None and can_hold_result(output, given, x):
                results.append(given)
            else:
                return None
        return results


_KNOWN: dict[Hashable, _CallReplay | None] = {}
"""Replays by kind; None for a kind of any number of rows if each number of rows needs a separate kind."""

_NOTHING: Any = object()

_LEARNING = Lock()

# A named tuple's own constructor is written in Python.
_as_result: Any = tuple.__new__


_PASSES: list["ReplayablePass[Any]"] = []
_NUMBERING = Lock()
"""Held while passes get numbers in the host extension: a module may define further passes at any time."""

_extension: Any = None
"""The host extension once it is loaded; it then makes the recorded calls."""

_load: Callable[[bool], Any] | None = partial(load_extension, MAX_KINDS)
"""Loads the host extension, or returns None; with whether the extension may now be built.

It is called at plans, and after some replays, until it returns the extension; at the first of these calls a GPU is
in use, and no graph is captured.  None if there is nothing to load any more, or Python is to make all calls.
"""

_replays = 0
_LOOKING = Lock()

is_capturing = torch.cuda.is_current_stream_capturing


def set_extension(extension: Any) -> None:
    """Let the host extension make the calls that it has recorded, and Python the others.

    If `extension` is None, Python makes all calls.
    """
    global _extension, _load
    with _NUMBERING:
        if extension is not None:
            for each in _PASSES:
                if each.extension_number < 0:
                    each.extension_number = extension.define_pass(each.roles)
        _extension, _load = extension, None


def _try_use_extension(may_build: bool) -> None:
    """Load the host extension if it exists, and let it make recorded calls from then on.

    All records in Python are dropped, so that each call is planned once more and recorded in the extension.
    Nothing is done during the capture of a graph, or while another thread searches.
    """
    if is_capturing() or not _LOOKING.acquire(blocking=False):
        return
    try:
        extension = None if _load is None else _load(may_build)
        if extension is not None:
            set_extension(extension)
            with _LEARNING:
                _KNOWN.clear()
    finally:
        _LOOKING.release()


def _count_replay_and_search_extension() -> None:
    """Count a replay by Python; at every `_LOOK_EVERY`th one, search for the host extension."""
    global _replays
    _replays += 1
    if _replays % _LOOK_EVERY == 0:
        _try_use_extension(may_build=True)


def clear_replays() -> None:
    """Forget all recorded calls, so that the next call of each kind is planned anew."""
    _KNOWN.clear()
    if _extension is not None:
        _extension.clear_replays()


def get_extension() -> Any:
    """Return the host extension if it makes recorded calls; else None."""
    return _extension


def is_extension_pending() -> bool:
    """Return whether the host extension will be used as soon as it exists."""
    return _load is not None


def encode_policy() -> int:
    """Encode the process's settings for all launches for the extension."""
    return may_wait() + 2 * is_batch_invariant()


class ReplayablePass(Generic[Result]):
    """A forward or backward pass of an operation, whose calls are recorded and repeated.

    Attributes:
        roles: as below.
        extension_number: the pass's number in the host extension, if that is in use.

    Args:
        result: the type of its result.
        roles: the roles of the inputs, x first; those beyond are parameters.  Empty if launches never depend only
            on the number of rows.
    """

    def __init__(self, result: type[Result], roles: tuple[ShapeRole, ...] = ()) -> None:
        self._result: Any = result
        self.roles = roles
        with _NUMBERING:
            self.extension_number = -1 if _extension is None else _extension.define_pass(roles)
            _PASSES.append(self)

    def try_replay(self, inputs: Inputs, options: Options, out: Result | None = None) -> Result | None:
        """Repeat the recorded launches of an earlier call like this one; return the results, or None if impossible.

        Return None if no such call is recorded, a tensor of `out` does not fit its result, a tensor is not
        aligned to 16 bytes, or a hook observes Triton's launches.  The call must be one without dropout.
        """
        if not prepared_kernels.can_bypass_triton():
            return None
        if _extension is not None and out is None:
            made: Result | None = _extension.replay(
                self.extension_number, encode_policy(), options, inputs, self._result
            )
            if made is not None:
                return made
        try:
            call_replay = self._find_replay(inputs, options)
        except (TypeError, AttributeError):
            # An option without a hash, or an argument that is no tensor: the checks raise the right error.
            return None
        if call_replay is None:
            return None
        recipe = call_replay.template
        if current_device() != recipe.device_index:
            with torch.cuda.device(recipe.device_index):
                return self.try_replay(inputs, options, out)
        at = [tensor.data_ptr() for tensor in inputs if tensor is not None]
        # Tensors without elements, and those of tracers, have address 0.
        if not all(at):
            return None
        x: Any = inputs[0]
        shape = x.shape
        *leading, cols = shape
        if out is None:
            results = [None if new is None else new(x, shape, leading) for new in call_replay.allocators]
        else:
            given = call_replay.try_allocate_missing(out, x, shape, leading)
            if given is None:
                return None
            results = given
        at += [tensor.data_ptr() for tensor in results if tensor is not None]
        if not recipe.try_launch(at, x.numel() // cols if recipe.program_rules else 0):
            return None
        if _load is not None:
            _count_replay_and_search_extension()
        for place, other in call_replay.shared_fields:
            results[place] = results[other]
        result: Result = _as_result(self._result, results)
        return result

    def record(
        self,
        launches: list[Launch],
        outputs: Outputs,
        tensors: Mapping[str, Tensor],
        inputs: Inputs,
        options: Options,
    ) -> None:
        """Record a call for `try_replay`, after it was checked, planned and launched.

        Nothing is recorded if `LaunchTemplate` does not support the launches.

        Args:
            tensors: inputs and results by name, in the order of the pass.
        """
        same = dict(_iterate_shared_fields(outputs))
        own = tuple(None if place in same else output for place, output in enumerate(outputs))
        recipe = LaunchTemplate.from_launches(launches, tensors)
        if recipe is None:
            return
        x: Any = inputs[0]
        if _load is not None:
            _try_use_extension(may_build=False)
        of_any_rows = _try_make_key_for_any_rows(self, self.roles, inputs, options)
        follows = of_any_rows is not None and bool(recipe.program_rules)
        new = tuple(None if output is None else _make_allocator(output, x, follows) for output in own)
        replay = _CallReplay(new, own, tuple(same.items()), recipe)
        if of_any_rows is not None:
            _store_replay(of_any_rows, replay if follows else None)
        if not follows:
            _store_replay(_make_call_key(self, inputs, options), replay)
        if _extension is not None:
            described_call = describe_call(recipe, outputs, x, follows)
            if described_call is not None:
                _extension.record_replay(self.extension_number, encode_policy(), options, inputs, *described_call)

    def _find_replay(self, inputs: Inputs, options: Options) -> _CallReplay | None:
        """Return the record of an earlier call like this one; None if there is none.

        The earlier call may have had another number of rows if all launches declare how they depend on that
        number.
        """
        of_any_rows = _try_make_key_for_any_rows(self, self.roles, inputs, options)
        if of_any_rows is not None:
            call_replay = _KNOWN.get(of_any_rows, _NOTHING)
            if call_replay is not None:
                return call_replay if call_replay is not _NOTHING else None
        return _KNOWN.get(_make_call_key(self, inputs, options))


def _make_call_key(replayable_pass: Hashable, inputs: Inputs, options: Options) -> Hashable:
    """Make the key under which a call of a pass is recorded, from everything in the call but addresses.

    Raises:
        TypeError: an option has no hash; raised when the key is first looked up.
    """
    kind: list[Hashable] = [replayable_pass, may_wait(), is_batch_invariant(), options]
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.is_neg())
    return tuple(kind)


def _try_make_key_for_any_rows(
    replayable_pass: Hashable, roles: tuple[ShapeRole, ...], inputs: Inputs, options: Options
) -> Hashable | None:
    """Make the key under which a call is recorded for any number of rows; None if there is no such key.

    There is none without `roles`, or if the strides between rows depend on the number of rows.

    Args:
        roles: the roles of the inputs, x first; inputs beyond these are parameters.  Empty if calls differ
            by more
            than their number of rows.
    """
    x: Any = inputs[0]
    shape = x.shape
    if not (roles and shape):
        return None
    kind: list[Hashable] = [replayable_pass, may_wait(), is_batch_invariant(), options, shape[-1]]
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
            is_fitting = tensor is x or tensor.shape == shape
            kind += (tensor.dtype, is_fitting, strides, tensor.get_device(), tensor.is_neg())
        elif role is _OF_ROWS:
            is_fitting = tensor.is_contiguous() and tensor.shape == shape[:-1]
            kind += (tensor.dtype, is_fitting, tensor.get_device(), tensor.is_neg())
        else:
            kind += (tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.get_device(), tensor.is_neg())
    return tuple(kind)


def _store_replay(kind: Hashable, replay: _CallReplay | None) -> None:
    """Store the record of a call under its key; if there are `MAX_KINDS` records, drop the oldest.

    A record of None means that each number of rows needs a key of its own.
    """
    with _LEARNING:
        if len(_KNOWN) >= MAX_KINDS and kind not in _KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[kind] = replay


def _iterate_shared_fields(outputs: Outputs) -> Iterator[tuple[int, int]]:
    """Yield pairs of fields whose results are one tensor: a later field, and the first field with it."""
    places: dict[int, int] = {}
    for place, output in enumerate(outputs):
        first = places.setdefault(id(output), place)
        if output is not None and first != place:
            yield place, first


def _make_allocator(output: OutputSpec, x: Tensor, any_rows: bool) -> Allocate:
    """Make the function that allocates one result of a recorded call when the call is repeated.

    With `any_rows` it allocates the result for any number of rows, else in the shape for this x.
    """
    dtype = TORCH_DTYPES[output.dtype]
    if output.has_x_layout and tuple(x.stride()) != contiguous_strides(x.shape):
        return lambda x, *_: torch.empty_like(x, dtype=dtype)
    # Sizes are passed one by one, if there are any: torch reads a tuple of them several times slower.
    new = x.new_empty(0, dtype=dtype).new_empty
    if output.shape is None and any_rows:
        if not output.dropped_axes:
            return lambda x, shape, leading: new(*shape)
        return lambda x, shape, leading: new(*leading) if leading else new(())
    sizes = output.compute_shape(x)
    return (lambda x, shape, leading: new(*sizes)) if sizes else lambda x, shape, leading: new(())
