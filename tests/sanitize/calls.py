"""Calls that together choose every algorithm, forward and backward, in tensors as small as the algorithm takes.

Row lengths and samples are at the limits of the launch tables' entries, and odd ones beside them; the options are
those of the fingerprints.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import torch
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm import config_tables as group_tables
from fusednorm.ops.group_norm.channels_last.stream_partitions import MEASURED_RANGE
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.ops.layer_norm.call import SINGLE_ROW_COLS

from benchmarks.algorithms.kernel_algorithms import PassAlgorithm, find_algorithm
from benchmarks.fingerprints import group_norm_cases, layer_norm_cases
from benchmarks.fingerprints.cases import DTYPES, SHORT_NAMES, FingerprintCase, plan_case

MOST_ELEMENTS = 1 << 22
"""Elements of the largest tensor of a call; entries of tables for larger ones are left out."""

_GROUP_PASSES: tuple[group_norm_cases.Pass, ...] = ("forward", "backward")
_VARIANTS = 2
"""Variants of a call for each shape, besides the plain and the modulated one, of all that the fingerprints have."""

_MODULATED_ROWS = next(each for each in layer_norm_cases.USUAL if each.modulations == ("scale", "shift", "gate"))
_MODULATED_GROUPS = next(each for each in group_norm_cases.RARE if each.adaptive)
_MODULATION_ROLES = {"modulations", "scale_shift"}

Variant = TypeVar("Variant")

_SEED = 20


@dataclass(frozen=True, slots=True)
class Call:
    """A call, the algorithms that its plan uses, and the name of x's dtype.

    Attributes:
        is_modulated: whether each sample has a scale, shift or gate.
    """

    case: FingerprintCase
    algorithms: frozenset[PassAlgorithm]
    dtype: str
    is_modulated: bool

    @property
    def combinations(self) -> frozenset[tuple[PassAlgorithm, str]]:
        return frozenset((algorithm, self.dtype) for algorithm in self.algorithms)


def calls(count: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Call]:
    """At most `count` calls in an order that is always the same.

    The first calls have every algorithm with every dtype, then also with tensors that start one element after a
    multiple of 16 bytes, then with a scale and shift of each sample; the others follow in a random order.
    """
    cases = {case.name: case for case in _cases(dtypes)}
    everything = sorted(filter(None, map(_call, cases.values())), key=lambda sized: sized[0])
    ordered = [call for _, call in everything]
    first: dict[str, Call] = {}
    for unaligned, is_modulated in ((False, False), (True, False), (False, True)):
        seen: set[tuple[PassAlgorithm, str]] = set()
        for call in ordered:
            is_kind = (call.case.unaligned, call.is_modulated) == (unaligned, is_modulated)
            if is_kind and not call.combinations <= seen:
                seen |= call.combinations
                first.setdefault(call.case.name, call)
    others = [call for call in ordered if call.case.name not in first]
    random.Random(_SEED).shuffle(others)
    return [*first.values(), *others][:count]


def _call(case: FingerprintCase) -> tuple[int, Call] | None:
    """A case's size and its call; None if it is refused or too large."""
    plan = plan_case(case)
    size = plan.tensors.max_elements
    if plan.launches is None or size > MOST_ELEMENTS:
        return None
    algorithms = frozenset(filter(None, map(_algorithm, plan.launches)))
    dtype = next(name for name in SHORT_NAMES.values() if f" {name} " in case.name)
    return size, Call(case, algorithms, dtype, not _MODULATION_ROLES.isdisjoint(plan.tensors.memories))


def _algorithm(launch: Launch) -> PassAlgorithm | None:
    return find_algorithm(launch.kernel.fn.__module__, launch.kernel.fn.__name__)


def _cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[FingerprintCase]:
    chosen = random.Random(_SEED)
    for dtype in dtypes:
        for kind in layer_norm_cases.PASSES:
            lengths = dict.fromkeys(
                cols for cols, _ in layer_norm_cases.iterate_table_lengths(kind, dtype.itemsize)
            )
            for cols in (*lengths, SINGLE_ROW_COLS + 1):
                yield from _rows(kind, dtype, cols, chosen)
        for kind in layer_norm_cases.CHANNEL_PASSES:
            for channels, vector, _ in layer_norm_cases.iterate_table_channels(kind, dtype.itemsize):
                yield from _channels(kind, dtype, channels, 3 * vector, chosen)
            yield from _channels(kind, dtype, 3, 49, chosen)
        for cols, norms, unaligned in product((16, 1000, 1024, 16384, 20000), (1, 3), (False, True)):
            yield _named(layer_norm_cases.make_chain_case(dtype, cols, norms, unaligned, rows=3), unaligned)
        for last in (False, True):
            for kind in _GROUP_PASSES:
                for shape in dict.fromkeys(_samples(kind, dtype.itemsize, last)):
                    yield from _groups(kind, dtype, SampleShape(*shape, channels_last=last), chosen)


def _rows(
    kind: layer_norm_cases.Pass, dtype: torch.dtype, cols: int, chosen: random.Random
) -> Iterator[FingerprintCase]:
    """Calls of rows of `cols` columns, and of odd ones beside them."""
    for length in (cols, cols - 1 | 1):
        for variant, unaligned, waits in _options(
            layer_norm_cases.PLAIN, _MODULATED_ROWS, layer_norm_cases.USUAL + layer_norm_cases.RARE, chosen
        ):
            small = replace(variant, rows=min(variant.rows, 3), tokens=2, unaligned=unaligned)
            yield _named(layer_norm_cases.make_case(kind, dtype, length, small, waits), unaligned)


def _channels(
    kind: layer_norm_cases.Pass, dtype: torch.dtype, channels: int, positions: int, chosen: random.Random
) -> Iterator[FingerprintCase]:
    """Calls of samples of so many channels and positions."""
    for variant, unaligned, waits in _options(
        layer_norm_cases.PLAIN, _MODULATED_ROWS, layer_norm_cases.CHANNEL_VARIANTS, chosen
    ):
        small = replace(variant, positions=positions, unaligned=unaligned)
        yield _named(layer_norm_cases.make_case(kind, dtype, channels, small, waits), unaligned)


def _groups(
    kind: group_norm_cases.Pass, dtype: torch.dtype, sample: SampleShape, chosen: random.Random
) -> Iterator[FingerprintCase]:
    """Calls of such samples."""
    for variant, unaligned, waits in _options(
        group_norm_cases.PLAIN, _MODULATED_GROUPS, group_norm_cases.USUAL + group_norm_cases.RARE, chosen
    ):
        small = replace(variant, samples=min(variant.samples, 2), unaligned=unaligned)
        yield _named(group_norm_cases.make_case(kind, dtype, sample, small, waits), unaligned)


def _options(
    plain: Variant, modulated: Variant, variants: tuple[Variant, ...], chosen: random.Random
) -> Iterator[tuple[Variant, bool, bool]]:
    """Variants, whether tensors start one element after 16 bytes, and whether programs may wait."""
    yield from ((plain, unaligned, waits) for unaligned, waits in product((False, True), repeat=2))
    yield modulated, False, True
    for variant in chosen.sample(variants, _VARIANTS):
        yield variant, chosen.random() < 0.5, chosen.random() < 0.5


def _named(case: FingerprintCase, unaligned: bool) -> FingerprintCase:
    return replace(case, name=f"{case.name}, offset") if unaligned else case


def _samples(kind: group_norm_cases.Pass, itemsize: int, last: bool) -> Iterator[tuple[int, int, int]]:
    """Groups, channels of a group and positions: just above an entry's predecessor, and odd ones."""
    yield from product((1, 32), (1, 3, 8, 10), (1, 49, 1023))
    yield from (
        (2, 64, 5329),
        (4, 80, 12 * 12),
        (32, 160, 9 * 9),
        (32, 160, 16 * 16),
        (32, 160, 13),
        (32, 80, 97),
        (2, 3, 10007),
    )
    if not last:
        before = 0
        for limit, _ in group_tables.FORWARD_CONTIGUOUS[itemsize]:
            yield 2, 8, before // 8 + 64
            yield 2, 5, before // 5 + 64 | 1
            before = limit
        yield from (
            (2, channels, positions) for channels, positions, _ in group_tables.BACKWARD_CONTIGUOUS[itemsize]
        )
        return
    forward = kind == "forward"
    streams = (group_tables.FORWARD_STREAM if forward else group_tables.BACKWARD_STREAM)[itemsize]
    yield from ((8, channels, positions) for channels, positions, _ in group_tables.FORWARD_CHANNELS_LAST[itemsize])
    yield from ((32, columns // 32, positions // MEASURED_RANGE + 1) for columns, positions, _ in streams)
