from itertools import product

import pytest
from fusednorm.launch.launches import REGISTERS_PER_SM
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

from benchmarks.tune.layer_norm.channels_first_candidates import iterate_candidates
from benchmarks.tune.layer_norm.trials import LayerNormTuningCell, time_cell
from tests.benchmarks.harness.fake_timer import Timer

CASES = list(product(("forward", "backward"), (48, 768, 4096), (49, 196, 3136), (2, 4)))


@pytest.mark.parametrize(("pass_", "channels", "positions", "itemsize"), CASES)
def test_there_are_some_once_with_room_for_their_programs(pass_, channels, positions, itemsize):
    found = list(iterate_candidates(pass_, channels, positions, itemsize))
    assert found
    assert len(found) == len(set(found))
    for config in found:
        programs = getattr(config, "programs_per_sm", 1)
        assert 32 * config.num_warps * programs <= 2048
        if isinstance(config, ChannelsFirstForwardTile | ChannelsFirstBackwardTile):
            held = channels * config.block_p * itemsize * (1 + (pass_ == "backward")) // 4
            assert held * programs < REGISTERS_PER_SM


@pytest.mark.parametrize(("pass_", "itemsize"), list(product(("forward", "backward"), (2, 4))))
def test_every_choice_of_the_tables_is_a_candidate(pass_, itemsize):
    table = tables.FORWARD if pass_ == "forward" else tables.BACKWARD
    for (of_element, access), entries in table.items():
        for channels, config in entries if of_element == itemsize else ():
            positions = 49 if access == tables.NARROWEST else 49 * access // itemsize
            assert config in set(iterate_candidates(pass_, channels, positions, itemsize)), (access, channels)


@pytest.mark.parametrize(
    ("pass_", "configs"),
    [
        ("forward", [ChannelsFirstForwardTile(8, 1, 1), ChannelsFirstForwardSweep(4, 1)]),
        ("backward", [ChannelsFirstBackwardTile(8, 1, 1), ChannelsFirstBackwardTile(4, 1, 1)]),
    ],
)
def test_a_cell_of_samples_is_timed(device, pass_, configs):
    rows = time_cell(LayerNormTuningCell(pass_, 20, "float32", 2, 9), configs, Timer(), device)
    assert [row.config for row in rows] == configs[::-1]
