"""Limits of a multiprocessor of compute capability 9.0 are the hardware's, not the bounds that candidates keep."""

from itertools import product

import pytest
from fusednorm.launch.launches import REGISTERS_PER_SM
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile

from benchmarks.tune.layer_norm.candidates import iterate_candidates
from benchmarks.workload.cell_suites import LONG_ROW_LENGTHS, ODD_ROW_LENGTHS, ROW_LENGTHS

VERY_LONG = 1 << 22
LENGTHS = (16, 64, 128, *ROW_LENGTHS, *LONG_ROW_LENGTHS, *ODD_ROW_LENGTHS, VERY_LONG)
CASES = list(product(("forward", "backward"), (2, 4)))

THREADS, THREADS_A_PROGRAM, REGISTERS_A_THREAD = 2048, 1024, 255
SHARED_BYTES = 227 << 10
MULTIPROCESSORS = 132

LONGEST_TIMED = LONG_ROW_LENGTHS[-2]
"""What stands for the last entry of a table, which has no end."""


@pytest.mark.parametrize(("pass_", "itemsize"), CASES)
def test_there_are_some_and_each_once(pass_, itemsize):
    kinds = set((tables.ForwardConfig if pass_ == "forward" else tables.BackwardConfig).__args__)
    for cols in LENGTHS:
        found = list(iterate_candidates(pass_, cols, itemsize))
        assert found, cols
        assert len(found) == len(set(found)), cols
        assert {type(config) for config in found} <= kinds, cols


@pytest.mark.parametrize(("pass_", "itemsize"), CASES)
def test_all_have_room_for_their_programs(pass_, itemsize):
    for _, config in every_candidate(pass_, itemsize):
        threads = 32 * config.num_warps
        resident = max(1, getattr(config, "programs_per_sm", 1))
        assert threads <= THREADS_A_PROGRAM
        assert threads * resident <= THREADS
        registers = min(REGISTERS_A_THREAD, REGISTERS_PER_SM // (threads * resident))
        assert _held_words(config, itemsize) / threads < registers, config
        assert _shared_bytes(config, itemsize) * resident <= SHARED_BYTES, config


@pytest.mark.parametrize(("pass_", "itemsize"), CASES)
def test_rows_fill_what_holds_them_and_are_longer_than_what_they_share(pass_, itemsize):
    for cols, config in every_candidate(pass_, itemsize):
        match config:
            case LayerNormForwardTile() | LayerNormForwardResident():
                assert cols <= config.chunks * config.block_n
                assert (config.chunks - 1) * config.block_n < cols
            case LayerNormBackwardTile():
                assert cols <= config.chunks * config.block_n < 2 * cols
                assert (config.chunks - 1) * config.block_n < cols
            case LayerNormForwardSweep():
                assert 2 * config.block_n <= cols
            case LayerNormForwardSplit():
                assert config.chunks * config.block_n < cols
            case LayerNormForwardCooperative():
                slab = config.chunks * config.block_n
                assert slab < cols <= slab * config.programs_per_sm * MULTIPROCESSORS
            case LayerNormBackwardCooperative():
                assert config.block_n < cols <= config.block_n * config.programs_per_sm * MULTIPROCESSORS


@pytest.mark.parametrize(("pass_", "itemsize"), CASES)
def test_every_choice_of_the_tables_is_a_candidate(pass_, itemsize):
    table = (tables.FORWARD if pass_ == "forward" else tables.BACKWARD)[itemsize]
    for limit, config in table:
        assert config in set(iterate_candidates(pass_, min(limit, LONGEST_TIMED), itemsize)), (limit, config)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_so_are_what_the_tables_leave_to_very_long_rows(itemsize):
    assert tables.FORWARD_SPLIT[itemsize] in set(iterate_candidates("forward", VERY_LONG, itemsize))
    assert tables.BACKWARD_SPLIT[itemsize] in set(iterate_candidates("backward", VERY_LONG, itemsize))


def every_candidate(pass_, itemsize):
    return ((cols, config) for cols in LENGTHS for config in iterate_candidates(pass_, cols, itemsize))


def _held_words(config, itemsize):
    """Registers of a program for what it holds at once of its rows, as they lie in memory."""
    match config:
        case LayerNormForwardTile():
            elements = config.rows * config.chunks * config.block_n
        case LayerNormForwardResident() | LayerNormForwardCooperative() | LayerNormForwardSplit():
            elements = config.chunks * config.block_n
        case LayerNormForwardSweep():
            elements = config.block_n
        case LayerNormBackwardTile():
            elements = 2 * config.rows * config.block_n
        case _:
            elements = 2 * config.block_n
    return elements * itemsize / 4


def _shared_bytes(config, itemsize):
    """Of a program's tiles under way."""
    match config:
        case LayerNormBackwardTile():
            return 2 * config.rows * config.block_n * itemsize * (config.stages - 1)
    return 0
