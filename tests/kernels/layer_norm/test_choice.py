"""Which configuration is chosen for a row, where the tables alone do not say it."""

import pytest
from fusednorm.launch.launch import REGISTERS_PER_SM
from fusednorm.ops.layer_norm import choice as launch
from fusednorm.ops.layer_norm import table as tables
from fusednorm.ops.layer_norm.configs import ForwardParts, ForwardRow, ForwardShared, ForwardSweep, ForwardTile
from fusednorm.policy import waiting

MULTIPROCESSORS = 132


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU, where programs can wait for one another."""
    monkeypatch.setattr(waiting, "INTERPRETED", False)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_residual_leaves_programs_their_registers(itemsize, compiled):
    for limit, choice in tables.FORWARD[itemsize]:
        with_residual = launch.choose_forward(limit, itemsize, MULTIPROCESSORS, residual=True)
        if isinstance(choice, ForwardRow) and isinstance(with_residual, ForwardRow):
            assert 1 <= with_residual.programs_per_sm <= choice.programs_per_sm
            threads = 32 * choice.num_warps * with_residual.programs_per_sm
            held = 2 * choice.chunks * itemsize * (2 if itemsize == 2 else 1)
            assert held * threads < REGISTERS_PER_SM
        elif isinstance(choice, ForwardRow):
            assert isinstance(with_residual, ForwardShared)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_odd_lengths_have_entries_of_their_own_and_their_neighbours_have_not(itemsize, compiled):
    for first, last, choice in tables.FORWARD_UNALIGNED[itemsize]:
        assert launch.choose_forward(first, itemsize, MULTIPROCESSORS, residual=False) == choice
        assert launch.choose_forward(last // 8 * 8, itemsize, MULTIPROCESSORS, residual=False) != choice


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_single_very_long_row_is_cut_as_several_are(itemsize, compiled):
    cols = tables.SINGLE_ROW_COLS
    several = launch.choose_forward(cols, itemsize, MULTIPROCESSORS, residual=False)
    single = launch.choose_forward(cols, itemsize, MULTIPROCESSORS, residual=False, single=True)
    assert isinstance(several, ForwardShared)
    assert isinstance(single, ForwardParts)
    assert (single.chunks, single.num_warps) == (several.chunks, several.num_warps)
    assert launch.choose_forward(cols - 1, itemsize, MULTIPROCESSORS, residual=False, single=True) != single


def test_programs_wait_for_one_another_only_where_they_can(monkeypatch):
    monkeypatch.setattr(waiting, "INTERPRETED", True)
    assert isinstance(launch.choose_forward(1 << 18, 4, MULTIPROCESSORS, residual=False), ForwardSweep)


@pytest.mark.parametrize("cols", [64, 2048, 16384])
def test_statistics_alone_hold_no_row(cols):
    assert not isinstance(launch.choose_statistics(cols, 2, MULTIPROCESSORS, False), ForwardTile | ForwardRow)


@pytest.mark.parametrize("partials", [1, 66, 132, 528, 1584, 5000])
def test_a_fold_takes_all_partials_at_once_where_registers_allow(partials):
    fold = launch.choose_fold(partials)
    assert fold["BLOCK_P"] >= min(partials, launch.FOLD_MAX_PARTIALS)
    assert fold["BLOCK_P"] * fold["BLOCK_N"] <= 32 * 32 * fold["num_warps"]


def test_parts_are_spread_before_they_are_gathered():
    assert launch.choose_parts_a_program(128) == 1
    assert 1 < launch.choose_parts_a_program(1 << 13) <= launch.MAX_PARTS_A_PROGRAM
    assert launch.choose_parts_a_program(1 << 20) == launch.MAX_PARTS_A_PROGRAM
