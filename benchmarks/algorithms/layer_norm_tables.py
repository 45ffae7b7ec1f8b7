"""The algorithms of LayerNorm and RMSNorm by row lengths."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.algorithms.algorithm_rules import (
    ALONE,
    STATISTICS,
    AlgorithmTable,
    Call,
    make_channel_formatter,
    make_rules,
)
from benchmarks.algorithms.kernel_algorithms import find_chosen_algorithm
from benchmarks.algorithms.limit_search import (
    Walk,
    count_from_two,
    make_multiples,
    make_non_multiples,
    search_limits,
)
from benchmarks.fingerprints.cases import FingerprintCase
from benchmarks.fingerprints.layer_norm_cases import (
    ROWS,
    VECTORS,
    LayerNormVariant,
    Pass,
    iterate_table_lengths,
    make_case,
    make_chain_case,
)

RAGGED = "rows not of whole 16 bytes"
RESIDUAL, FUSED = "a residual", "a residual, an activation or dropout"
HEADS, ONE_ROW = "heads", "one row"

FLOAT8 = "a float8 y"
"""A purpose of the forward pass."""

_TRAITS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("layer_norm.forward", ""): (("", ALONE), ("", HEADS, ONE_ROW), ("", RESIDUAL), ("", RAGGED)),
    ("layer_norm.forward", STATISTICS): (("", ALONE), ("", FUSED), ("", RAGGED)),
    ("layer_norm.backward", ""): (("", ALONE), ("", HEADS), ("", FUSED), ("", RAGGED)),
    ("layer_norm.forward", FLOAT8): (("", ALONE), ("", HEADS), ("", RAGGED)),
    ("layer_norm.chain", ""): (("", RAGGED),),
    ("layer_norm.channels_first.forward", ""): (("", RESIDUAL),),
    ("layer_norm.channels_first.forward", STATISTICS): (("", RESIDUAL),),
    ("layer_norm.channels_first.backward", ""): (("", RESIDUAL),),
}
"""Traits of the calls of each pass, and of passes with a purpose."""


def make_pass_tables() -> Iterator[AlgorithmTable]:
    """A table for each pass and purpose."""
    for (pass_, purpose), traits in _TRAITS.items():
        calls = list(product(*traits))
        lines = make_rules(calls, partial(_search_call, pass_, purpose))
        yield AlgorithmTable(pass_, purpose, calls, (0,), lines, make_channel_formatter(1))


def make_call_case(
    pass_: str, purpose: str, call: Call, dtype: torch.dtype, cols: int, **others: Any
) -> FingerprintCase:
    """A call with these traits, and with `others` of a `LayerNormVariant`."""
    if pass_ == "layer_norm.chain":
        return make_chain_case(dtype, cols, 2)
    kind: Pass = "float8" if purpose == FLOAT8 else "forward"
    if pass_.endswith(".backward") or purpose == STATISTICS:
        kind = "backward"
    has: dict[str, Any] = {
        "stats": purpose != STATISTICS,
        "weight": False,
        "bias": False,
        "residual": "own" if {RESIDUAL, FUSED} & {*call} else "",
        "heads": "shared" if HEADS in call else "",
        "positions": VECTORS if "channels_first" in pass_ else 0,
        "rows": 1 if ONE_ROW in call else ROWS,
    }
    return make_case(kind, dtype, cols, LayerNormVariant("walk", **has | others), ALONE not in call)


def _search_call(pass_: str, purpose: str, call: Call) -> tuple[dict[int, Walk], dict[int, Walk]]:
    two, four = (_search_lengths(pass_, purpose, call, dtype) for dtype in (torch.float16, torch.float32))
    return {0: two}, {0: four}


def _search_lengths(pass_: str, purpose: str, call: Call, dtype: torch.dtype) -> Walk:
    vector = 16 // dtype.itemsize
    sizes = make_non_multiples(vector) if RAGGED in call else make_multiples(vector)
    if "channels_first" in pass_:
        sizes = count_from_two

    def choose(number: int) -> str:
        return find_chosen_algorithm(make_call_case(pass_, purpose, call, dtype, sizes(number)), pass_)

    return search_limits(sizes, _iterate_grid(dtype.itemsize), choose)


def _iterate_grid(itemsize: int) -> Iterator[int]:
    """A row length that each entry of every table serves."""
    kinds: tuple[Pass, ...] = ("forward", "backward", "float8")
    return (cols for kind in kinds for cols, _ in iterate_table_lengths(kind, itemsize))
