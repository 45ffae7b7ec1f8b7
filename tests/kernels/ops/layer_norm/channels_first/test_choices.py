"""The choice of a configuration by channels, positions and size of an element."""

import pytest
from fusednorm.ops.layer_norm.channels_first import config_tables as tables
from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.choices import choose_backward, choose_forward
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep


@pytest.mark.parametrize(
    ("positions", "itemsize", "access"),
    [(3136, 2, 16), (196, 2, 8), (98, 2, 4), (49, 2, 4), (196, 4, 16), (98, 4, 8), (49, 4, 4)],
)
def test_the_table_is_that_of_the_widest_access(positions, itemsize, access):
    for channels in (1, 100, 1000):
        entries = tables.FORWARD[itemsize, access]
        right = next(config for limit, config in entries if channels <= limit)
        assert choose_forward(channels, positions, itemsize) == right


def test_tiles_are_no_larger_than_a_sample():
    assert choose_forward(64, 8, 2).block_p == choose_backward(64, 8, 2).block_p == 8
    assert choose_forward(4096, 8, 2).block_p == choose_backward(4096, 8, 2).block_p == 8


def test_a_residual_leaves_room_for_half_as_many_programs():
    plain, with_residual = (choose_forward(128, 3136, 2, has_residual) for has_residual in (False, True))
    assert with_residual.programs_per_sm == plain.programs_per_sm // 2


@pytest.mark.parametrize(("has_residual", "factor"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_more_channels_than_a_program_holds_are_read_twice(itemsize, has_residual, factor):
    for choose, table, kind in (
        (choose_forward, tables.FORWARD, ChannelsFirstForwardSweep),
        (choose_backward, tables.BACKWARD, ChannelsFirstBackwardSplit),
    ):
        most = table[itemsize, 16][-1][0] // factor
        chosen = [choose(channels, 3136, itemsize, has_residual) for channels in (most, most + 1)]
        assert [isinstance(config, kind) for config in chosen] == [False, True]
