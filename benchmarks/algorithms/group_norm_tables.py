"""The algorithms of GroupNorm by samples: by elements of a group if it is contiguous, else by positions."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from fusednorm.ops.group_norm.sample_shape import SampleShape

from benchmarks.algorithms.algorithm_rules import (
    ALONE,
    STATISTICS,
    AlgorithmTable,
    Call,
    make_channel_formatter,
    make_joint_formatter,
    make_rules,
)
from benchmarks.algorithms.kernel_algorithms import PassAlgorithm, find_chosen_algorithm
from benchmarks.algorithms.limit_search import (
    Sizes,
    Walk,
    count_from_two,
    list_octave_sizes,
    make_multiples,
    make_non_multiples,
    search_limits,
)
from benchmarks.fingerprints.cases import FingerprintCase
from benchmarks.fingerprints.group_norm_cases import GROUPS, GroupNormVariant, Pass, make_case
from benchmarks.workload.benchmark_cells import ITEMSIZE
from benchmarks.workload.cell_suites import SUITES

RAGGED = "channels not of whole 16 bytes"
RESIDUAL, MOST = "a residual", "a float32 residual and dropout"

CHANNELS = (1, 3, 4, 8, 10, 16, 20, 30, 32, 40, 60, 64, 80, 160)
FEW_CHANNELS = (1, 3, 8, 10, 30, 80)
"""Numbers of channels of a group."""

_TRAITS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("contiguous.forward", ""): (("", ALONE), ("", RAGGED), ("", RESIDUAL, MOST)),
    ("contiguous.forward", STATISTICS): (("", ALONE), ("", RAGGED)),
    ("contiguous.backward", ""): (("", ALONE), ("", RAGGED)),
    ("channels_last.forward", ""): (("", ALONE), ("", MOST)),
    ("channels_last.forward", STATISTICS): (("", ALONE),),
    ("channels_last.backward", ""): (("", ALONE),),
}
"""Traits of the calls of each pass, and of passes with a purpose."""


def make_pass_tables() -> Iterator[AlgorithmTable]:
    """A table for each pass and purpose."""
    for (pass_, purpose), traits in _TRAITS.items():
        name = f"group_norm.{pass_}"
        calls = list(product(*traits))
        channels = _list_channels(name, purpose)
        some = channels == FEW_CHANNELS
        lines = make_rules(calls, partial(_search_call, name, purpose), whole_cells=some)
        text = (make_joint_formatter if some else make_channel_formatter)(len(channels))
        yield AlgorithmTable(name, purpose, calls, channels, lines, text)


def iterate_benchmark_shapes() -> Iterator[tuple[PassAlgorithm, int, str]]:
    """The choice for each shape of the benchmarks: the algorithm, the bytes of an element, the shape."""
    cells = {
        (cell.pass_, cell.layout, cell.shape, cell.groups, ITEMSIZE[cell.dtype]): None
        for cell in SUITES["group_norm"]()
    }
    for kind, layout, shape, groups, itemsize in cells:
        last = layout == "nhwc"
        pass_ = f"group_norm.{'channels_last' if last else 'contiguous'}.{kind}"
        sample = SampleShape(groups, shape[1] // groups, prod(shape[2:]), last)
        dtype = torch.float16 if itemsize == 2 else torch.float32
        name = find_chosen_algorithm(make_call_case(pass_, "", (), dtype, sample, samples=shape[0]), pass_)
        text = "x".join(map(str, shape)) + ("" if groups == GROUPS else f" in {groups}")
        yield PassAlgorithm(pass_, name), itemsize, text


def make_call_case(
    pass_: str, purpose: str, call: Call, dtype: torch.dtype, sample: SampleShape, **others: Any
) -> FingerprintCase:
    """A call with these traits over `sample`, and with `others` of a `GroupNormVariant`."""
    kind: Pass = "backward" if pass_.endswith("backward") or purpose == STATISTICS else "forward"
    has: dict[str, Any] = {"stats": purpose == "", "weight": False, "bias": False}
    if MOST in call:
        has |= {"residual": "own" if dtype == torch.float32 else "other dtype", "dropout": 0.1}
    elif RESIDUAL in call:
        has["residual"] = "own"
    return make_case(kind, dtype, sample, GroupNormVariant("walk", **has | others), ALONE not in call)


def _search_call(pass_: str, purpose: str, call: Call) -> tuple[dict[int, Walk], dict[int, Walk]]:
    two, four = (
        {
            channels: _search_channels(pass_, purpose, call, dtype, channels)
            for channels in _list_channels(pass_, purpose)
        }
        for dtype in (torch.float16, torch.float32)
    )
    return two, four


def _list_channels(pass_: str, purpose: str) -> tuple[int, ...]:
    """The numbers of channels; 0 if only the number of a group's elements matters."""
    if "channels_last" in pass_:
        return CHANNELS
    return FEW_CHANNELS if pass_.endswith("backward") or purpose else (0,)


def _search_channels(pass_: str, purpose: str, call: Call, dtype: torch.dtype, channels: int) -> Walk:
    vector = 16 // dtype.itemsize
    last = "channels_last" in pass_
    # Groups of this many channels are multiples of 16 bytes for any number of positions.
    of_group = channels or (vector if RAGGED in call else 1)
    # A sample of one position is in both layouts.
    positions: Sizes = make_non_multiples(vector) if RAGGED in call else make_multiples(vector)
    if last:
        positions = count_from_two

    def compute_size(number: int) -> int:
        return positions(number) * (1 if last else of_group)

    def choose(number: int) -> str:
        sample = SampleShape(GROUPS, of_group, positions(number), last)
        return find_chosen_algorithm(make_call_case(pass_, purpose, call, dtype, sample), pass_)

    return search_limits(compute_size, _iterate_grid(last, channels), choose, slack=0 if last else 7)


def _iterate_grid(last: bool, channels: int) -> Iterable[int]:
    """Grid points between which the search misses no limit, as random calls have shown.

    The padding of programs grows just above multiples of 1024 elements of a group, or of powers of two of channels
    and of positions.
    """
    if last:
        return ()
    if channels:
        return list_octave_sizes(8, 1 << 13)
    return (size + above for size in range(4096, 1 << 16, 1024) for above in (0, 32))
