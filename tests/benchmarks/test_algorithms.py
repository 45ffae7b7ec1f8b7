"""Which shapes choose which algorithm: that the page says it, that it is true, that each algorithm is chosen."""

import importlib
import pkgutil
import random
from pathlib import Path
from typing import Any

import fusednorm.ops
import pytest
import torch
from fusednorm.ops.group_norm.sample_shape import SampleShape

from benchmarks.algorithms import __main__ as command
from benchmarks.algorithms import algorithm_page as pages
from benchmarks.algorithms import group_norm_tables, layer_norm_tables
from benchmarks.algorithms.algorithm_rules import (
    ALONE,
    AlgorithmRule,
    AlgorithmTable,
    make_channel_formatter,
    make_joint_formatter,
    make_rules,
)
from benchmarks.algorithms.kernel_algorithms import PASSES, PassAlgorithm, find_algorithm, find_chosen_algorithm
from benchmarks.algorithms.limit_search import (
    LONGEST,
    list_octave_sizes,
    make_multiples,
    make_non_multiples,
    search_limits,
)
from tests.kernels.harness.compiled import compile_elsewhere

PAGE = Path(__file__).parents[2] / "docs/architecture-reference.md"

TRIES = 100
"""Calls at random for each table."""


def facts() -> dict[str, Any]:
    """What a process with Triton's compiler finds out, in which programs may wait for one another."""
    page = pages.AlgorithmPage()
    draw = random.Random(20)
    untrue = []
    for table in page.tables:
        try_one = _of_rows if table.pass_.startswith("layer_norm") else _of_samples
        for _ in range(TRIES):
            call, place, channels, size, found = try_one(table, draw)
            names = [table.find_algorithms(call, place, channels, near) for near in (size, size - 8, size + 8)]
            if found not in ("".join(said) for said in (names if "contiguous" in table.pass_ else names[:1])):
                untrue.append(f"{table.pass_} {call} {place} {channels} {size}: {found}, not {names[0]}")
    return {
        "text": page.text,
        "unreached": page.unreached,
        "chosen": sorted(page.chosen),
        "configured": sorted(_configured()),
        "untrue": untrue,
    }


def _configured() -> set[PassAlgorithm]:
    """The algorithms whose files have a configuration: a dataclass that says how many warps a program has."""
    found = set()
    for info in pkgutil.walk_packages(fusednorm.ops.__path__, f"{fusednorm.ops.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            fields = getattr(value, "__dataclass_fields__", ())
            if getattr(value, "__module__", "") == info.name and any(name.endswith("num_warps") for name in fields):
                folder, _, name = info.name.removeprefix(f"{fusednorm.ops.__name__}.").rpartition(".")
                found.add(PassAlgorithm(folder, name))
    return found


def _of_rows(table: AlgorithmTable, draw: random.Random) -> tuple[Any, ...]:
    call, place = draw.choice(table.calls), draw.randrange(2)
    dtype = (draw.choice((torch.float16, torch.bfloat16)), torch.float32)[place]
    vector = 16 // dtype.itemsize
    size = max(vector, int(2 ** draw.uniform(0, 25)) // vector * vector)
    if layer_norm_tables.RAGGED in call:
        size += draw.randrange(1, vector)
    others = {"weight": draw.random() < 0.5, "other_dtypes": draw.random() < 0.5, "is_rms": draw.random() < 0.5}
    if layer_norm_tables.FUSED in call:
        fused = ({"residual": "own"}, {"activation": "silu"}, {"dropout": 0.1})
        # Of which statistics know the residual alone.
        others |= {"residual": ""} | draw.choice(fused[: 1 if table.purpose else 3])
    elif table.pass_ != "layer_norm.backward" and not table.purpose:
        others |= {"activation": draw.choice(("none", "gelu")), "dropout": draw.choice((0.0, 0.1))}
    case = layer_norm_tables.make_call_case(table.pass_, table.purpose, call, dtype, size, **others)
    return call, place, 0, size, find_chosen_algorithm(case, table.pass_)


def _of_samples(table: AlgorithmTable, draw: random.Random) -> tuple[Any, ...]:
    call, place = draw.choice(table.calls), draw.randrange(2)
    dtype = (draw.choice((torch.float16, torch.bfloat16)), torch.float32)[place]
    vector = 16 // dtype.itemsize
    last = "channels_last" in table.pass_
    channels = draw.choice(table.channels)
    of_group = channels or draw.choice(group_norm_tables.CHANNELS)
    positions = int(2 ** draw.uniform(1, 22))
    if not last:
        positions = max(vector, positions // vector * vector)
        if group_norm_tables.RAGGED in call:
            positions += draw.randrange(1, vector, 2)
    # One channel in all lies in either layout.
    groups = 32 if last else draw.choice((8, 32, 1 if of_group > 1 else 2))
    others = {
        "weight": draw.random() < 0.5,
        "activation": draw.choice(("none", "silu", "relu")),
        "adaptive": draw.random() < 0.5,
        "other_dtypes": draw.random() < 0.5,
        "samples": draw.choice((1, 2, 300)),
        "batch_invariant": draw.random() < 0.5,
    }
    sample = SampleShape(groups, of_group, positions, last)
    case = group_norm_tables.make_call_case(table.pass_, table.purpose, call, dtype, sample, **others)
    return call, place, channels, positions * (1 if last else of_group), find_chosen_algorithm(case, table.pass_)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """`facts` of a process of its own."""
    return compile_elsewhere(
        "import json\nfrom tests.benchmarks.test_algorithms import facts\nprint(json.dumps(facts()))"
    )


@pytest.mark.slow
def test_the_page_has_what_the_command_prints(found):
    page = PAGE.read_text(encoding="utf-8")
    assert pages.insert_tables(page, found["text"]) == page, (
        "python -m benchmarks.algorithms --write docs/architecture-reference.md"
    )


@pytest.mark.slow
def test_some_shape_chooses_each_algorithm(found):
    assert found["unreached"] == []
    assert {pass_ for pass_, _ in found["chosen"]} == set(PASSES)
    configured = {tuple(each) for each in found["configured"]}
    assert len(configured) > 20
    assert configured <= {tuple(each) for each in found["chosen"]}


@pytest.mark.slow
def test_lines_hold_for_calls_at_random(found):
    assert found["untrue"] == []


def walked(size_of, limits, grid=()):
    """A walk over what has a name up to each of `limits`, and the sizes that it asked for."""
    asked = []

    def choose(number):
        asked.append(size_of(number))
        return next(name for limit, name in limits if asked[-1] <= limit)

    return search_limits(size_of, grid, choose), asked


def test_a_walk_finds_limits_without_asking_for_many_sizes():
    limits = [(100, "a"), (5000, "b"), (LONGEST, "c")]
    found, asked = walked(make_multiples(1), limits)
    assert found == limits
    assert len(asked) < 60


def test_limits_between_sizes_of_a_class_are_the_roundest_ones():
    limits = [(1024, "a"), (3072, "b"), (LONGEST, "c")]
    for sizes in (make_multiples(8), make_multiples(48), make_non_multiples(8), make_non_multiples(4, 4)):
        found, asked = walked(sizes, limits)
        assert found == limits
        assert len({*asked}) == len(asked)


def test_a_walk_finds_what_returns_between_points_of_its_grid():
    limits = [(1100, "a"), (1120, "b"), (LONGEST, "a")]
    assert walked(make_multiples(1), limits)[0] == [(LONGEST, "a")]
    assert walked(make_multiples(1), limits, grid=list_octave_sizes(64, 2048))[0] == limits


def test_sizes_are_whole_or_ragged():
    assert [make_multiples(8)(number) for number in (1, 2, 3)] == [8, 16, 24]
    assert [make_non_multiples(4)(number) for number in range(1, 7)] == [2, 3, 5, 6, 7, 9]
    assert [make_non_multiples(4, 5)(number) for number in (2, 3)] == [15, 25]
    assert list_octave_sizes(4, 16) == [4, 5, 6, 7, 8, 10, 12, 14]


def lines_of_walks(walks, **options):
    """Lines of calls with one trait or without, the same with two bytes and with four."""
    return make_rules([("",), (ALONE,)], lambda call: (walks[call[0]], walks[call[0]]), **options)


def test_a_line_says_what_no_line_before_it_does():
    usual = {1: [(64, "tile"), (LONGEST, "split")], 2: [(LONGEST, "tile")]}
    alone = {1: [(64, "tile"), (LONGEST, "sweep")], 2: [(LONGEST, "tile")]}
    everything, cell = ((1, LONGEST),), ((65, LONGEST),)
    found = lines_of_walks({"": usual, ALONE: alone})
    assert found["tile"] == [AlgorithmRule(("",), ({1: ((1, 64),), 2: everything},) * 2)]
    assert found["sweep"] == [AlgorithmRule((ALONE,), ({1: cell},) * 2)]
    # What no channels choose is said of all.
    assert found["split"] == [
        AlgorithmRule(("",), ({1: cell},) * 2),
        AlgorithmRule((ALONE,), ({1: (), 2: ()},) * 2),
    ]
    assert lines_of_walks({"": usual, ALONE: alone}, whole_cells=True)["sweep"][0].cells[0] == {1: cell, 2: ()}
    table = AlgorithmTable("a pass", "", (), (), found, make_channel_formatter(2))
    assert [table.find_algorithms((ALONE,), 0, 1, size) for size in (64, 65)] == [["tile"], ["sweep"]]
    assert [table.find_algorithms(("",), 1, 1, size) for size in (64, 65)] == [["tile"], ["split"]]
    assert table.reached_algorithms == ["tile", "split", "sweep"]


def test_cells_in_words():
    by_channels = make_channel_formatter(3)
    assert by_channels({}) == ""
    assert by_channels({1: (), 2: ()}) == "none"
    assert by_channels({1: ((1, LONGEST),), 2: ((1, LONGEST),), 3: ((1, LONGEST),)}) == "all"
    assert (
        by_channels({1: ((1, 8), (16, 20)), 2: ((9, LONGEST),), 3: ((9, LONGEST),)}) == "1: ≤ 8, 16-20; 2, 3: ≥ 9"
    )
    assert make_channel_formatter(1)({0: ((1 << 20, (1 << 25) - 1),)}) == "2^20-2^25 - 1"
    of_some = make_joint_formatter(2)
    assert of_some({1: ((1, 10), (21, LONGEST)), 2: ((1, 10), (14, 16), (19, 20))}) == "≤ 10, some ≥ 14"
    assert of_some({1: (), 2: ()}) == "none"


def test_an_algorithm_that_no_shape_chooses_is_shown_and_is_an_error(monkeypatch, capsys):
    stray = PassAlgorithm("layer_norm.chain", "stray")
    lines = {"tile": [AlgorithmRule(("",), ({0: ((1, LONGEST),)}, {0: ((1, 64),)}))]}
    table = AlgorithmTable("layer_norm.chain", "", (("",),), (0,), lines, make_channel_formatter(1))
    monkeypatch.setattr(pages, "list_algorithms", lambda: [PassAlgorithm("layer_norm.chain", "tile"), stray])
    monkeypatch.setattr(layer_norm_tables, "make_pass_tables", lambda: [table])
    monkeypatch.setattr(group_norm_tables, "make_pass_tables", lambda: [])
    monkeypatch.setattr(group_norm_tables, "iterate_benchmark_shapes", lambda: [])
    monkeypatch.setattr(command, "INTERPRETED", False)
    assert command.main([]) == 1
    printed = capsys.readouterr()
    assert "| tile | anything | all | ≤ 64 |\n| stray | **no shape chooses it** |  |  |" in printed.out
    assert "no shape chooses layer_norm.chain.stray" in printed.err


def test_the_command_writes_between_the_comments(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    monkeypatch.setattr(command, "AlgorithmPage", lambda: type("Page", (), {"text": "new\n", "unreached": []}))
    monkeypatch.setattr(command, "INTERPRETED", False)
    assert command.main(["--write", str(page)]) == 0
    assert page.read_text() == f"before\n{pages.BEGIN}\n\nnew\n\n{pages.END}\nafter\n"
    for broken in ("before\n", f"{pages.END}\n{pages.BEGIN}\n", f"{pages.BEGIN}\n{pages.END}\n{pages.END}\n"):
        with pytest.raises(ValueError, match="lacks the lines"):
            pages.insert_tables(broken, "new")


def test_a_kernel_of_an_unknown_kind_or_folder_is_an_error():
    assert find_algorithm("fusednorm.ops.layer_norm.chain", "a_tile_kernel") == PassAlgorithm(
        "layer_norm.chain", "tile"
    )
    assert find_algorithm("fusednorm.ops.layer_norm.backward.partial_reduction", "a_reduce_kernel") is None
    for module, kernel in (("layer_norm.forward.tile", "a_kernel"), ("layer_norm.sideways", "a_tile_kernel")):
        with pytest.raises(ValueError, match="is unknown"):
            find_algorithm(f"fusednorm.ops.{module}", kernel)
