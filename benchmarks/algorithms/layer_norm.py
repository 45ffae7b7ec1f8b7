"""The algorithms of LayerNorm and RMSNorm by row lengths."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.algorithms.chosen import chosen
from benchmarks.algorithms.lines import ALONE, STATISTICS, Call, Table, lines_of, text_by_channels
from benchmarks.algorithms.walks import Walk, ragged, walk, whole
from benchmarks.fingerprints.cases import Case
from benchmarks.fingerprints.layer_norm import ROWS, Pass, Variant, case, chain_case, entries

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
}
"""Traits of the calls of each pass, and of passes with a purpose."""


def pass_tables() -> Iterator[Table]:
    """A table for each pass and purpose."""
    for (pass_, purpose), traits in _TRAITS.items():
        calls = list(product(*traits))
        lines = lines_of(calls, partial(_walks, pass_, purpose))
        yield Table(pass_, purpose, calls, (0,), lines, text_by_channels(1))


def call_case(pass_: str, purpose: str, call: Call, dtype: torch.dtype, cols: int, **others: Any) -> Case:
    """A call with these traits, and with `others` of a `Variant`."""
    if pass_ == "layer_norm.chain":
        return chain_case(dtype, cols, 2)
    kind: Pass = "float8" if purpose == FLOAT8 else "forward"
    if pass_ == "layer_norm.backward" or purpose == STATISTICS:
        kind = "backward"
    has: dict[str, Any] = {
        "stats": purpose != STATISTICS,
        "weight": False,
        "bias": False,
        "residual": "own" if {RESIDUAL, FUSED} & {*call} else "",
        "heads": "shared" if HEADS in call else "",
        "rows": 1 if ONE_ROW in call else ROWS,
    }
    return case(kind, dtype, cols, Variant("walk", **has | others), ALONE not in call)


def _walks(pass_: str, purpose: str, call: Call) -> tuple[dict[int, Walk], dict[int, Walk]]:
    two, four = (_walk(pass_, purpose, call, dtype) for dtype in (torch.float16, torch.float32))
    return {0: two}, {0: four}


def _walk(pass_: str, purpose: str, call: Call, dtype: torch.dtype) -> Walk:
    sizes = (ragged if RAGGED in call else whole)(16 // dtype.itemsize)

    def choose(number: int) -> str:
        return chosen(call_case(pass_, purpose, call, dtype, sizes(number)), pass_)

    return walk(sizes, _grid(dtype.itemsize), choose)


def _grid(itemsize: int) -> Iterator[int]:
    """A row length that each entry of every table serves."""
    kinds: tuple[Pass, ...] = ("forward", "backward", "float8")
    return (cols for kind in kinds for cols, _ in entries(kind, itemsize))
