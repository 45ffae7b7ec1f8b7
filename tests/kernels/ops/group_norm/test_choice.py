"""Which configuration is chosen for a sample, where the tables alone do not say it."""

import pytest
from fusednorm.ops.group_norm import config_tables as tables
from fusednorm.ops.group_norm.backward_choice import choose_backward, find_split_backward
from fusednorm.ops.group_norm.channels_last.backward.columns import BackwardColumnSplit
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.backward.sweep import BackwardBlockSweep
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumnSplit
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.contiguous.backward.split import GroupNormBackwardSplit
from fusednorm.ops.group_norm.contiguous.backward.sweep import GroupNormBackwardSweep
from fusednorm.ops.group_norm.contiguous.backward.tile import GroupNormBackwardTile
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.tile import GroupNormForwardTile
from fusednorm.ops.group_norm.forward_choice import choose_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape

MULTIPROCESSORS = 132
GROUPS = 32
SAMPLES = [
    SampleShape(groups, channels, hw, last)
    for groups, channels, hw in ((32, 16, 4096), (32, 10, 4096), (32, 4, 2**20), (1, 64, 5329), (7, 3, 10007))
    for last in (False, True)
]


def chosen_like(config, entry):
    """Whether a configuration is the entry, perhaps with fewer chunks that come out even."""
    if isinstance(entry, GroupNormForwardCooperative | ForwardCooperativeBlock):
        return type(config) is type(entry) and config.chunks <= entry.chunks and config.lag == entry.lag
    return config == entry


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_entry_serves_the_largest_groups_of_its_class(itemsize):
    on_every_device = 1 << 20  # multiprocessors: what is shared fits
    for most, entry in tables.FORWARD_CONTIGUOUS[itemsize]:
        sample = SampleShape(GROUPS, 1, most, channels_last=False)
        assert chosen_like(choose_forward(sample, itemsize, on_every_device), entry)
    for channels, most, entry in tables.FORWARD_CHANNELS_LAST[itemsize]:
        sample = SampleShape(GROUPS, channels, most, channels_last=True)
        assert chosen_like(choose_forward(sample, itemsize, MULTIPROCESSORS), entry)
    for columns, most, entry in tables.FORWARD_STREAM[itemsize]:
        sample = SampleShape(GROUPS, columns // GROUPS, most, channels_last=True)
        assert choose_forward(sample, itemsize, MULTIPROCESSORS, can_wait=False) == entry
    for columns, most, entry in tables.BACKWARD_STREAM[itemsize]:
        sample = SampleShape(GROUPS, columns // GROUPS, most, channels_last=True)
        assert choose_backward(sample, itemsize, MULTIPROCESSORS) == entry
    for channels, most, entry in tables.BACKWARD_CONTIGUOUS[itemsize]:
        assert choose_backward(SampleShape(GROUPS, channels, most, False), itemsize, MULTIPROCESSORS) == entry


@pytest.mark.parametrize(
    ("positions", "lag"), [(128**2, 1), (24**3, 1), (48**3, 1), (64**3, 1), (96**3, 1), (128**3, 2)]
)
def test_channels_that_are_groups_of_their_own_are_shared_in_parts_of_8192_positions(positions, lag):
    config = choose_backward(SampleShape(GROUPS, 1, positions, channels_last=False), 2, MULTIPROCESSORS)
    assert isinstance(config, GroupNormBackwardCooperative)
    assert (config.channels, config.count_range_positions(2), config.lag) == (1, 8192, lag)


@pytest.mark.parametrize("positions", [28**2, 12**3, 56**2])
def test_channels_that_a_program_holds_are_not_shared(positions):
    config = choose_backward(SampleShape(GROUPS, 1, positions, channels_last=False), 2, MULTIPROCESSORS)
    assert isinstance(config, GroupNormBackwardTile)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_what_programs_share_is_resident_and_covers_the_group(sample, itemsize):
    forward = choose_forward(sample, itemsize, MULTIPROCESSORS)
    if isinstance(forward, GroupNormForwardCooperative):
        members = forward.count_members(sample)
        slab = forward.chunks * forward.chunk_elements
        assert (members - 1) * slab < sample.group_length <= members * slab
        assert members <= MULTIPROCESSORS * forward.programs_per_sm
    elif isinstance(forward, ForwardCooperativeBlock):
        assert forward.count_members(sample, itemsize) <= MULTIPROCESSORS * forward.programs_per_sm
    backward = choose_backward(sample, itemsize, MULTIPROCESSORS)
    if isinstance(backward, GroupNormBackwardCooperative | BackwardCooperativeBlock):
        assert backward.count_members(sample, itemsize) <= MULTIPROCESSORS * backward.programs_per_sm


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_nothing_is_shared_where_programs_may_not_wait(sample, itemsize):
    forward = choose_forward(sample, itemsize, MULTIPROCESSORS, can_wait=False)
    assert not isinstance(forward, GroupNormForwardCooperative | ForwardCooperativeBlock)
    backward = choose_backward(sample, itemsize, MULTIPROCESSORS, can_wait=False)
    assert not isinstance(backward, GroupNormBackwardCooperative | BackwardCooperativeBlock)


def test_groups_larger_than_the_device_are_read_twice():
    for last in (False, True):
        sample = SampleShape(1, 64, 2**24, last)
        assert not isinstance(
            choose_forward(sample, 2, MULTIPROCESSORS), GroupNormForwardCooperative | ForwardCooperativeBlock
        )
        assert not isinstance(
            choose_backward(sample, 2, MULTIPROCESSORS), GroupNormBackwardCooperative | BackwardCooperativeBlock
        )


POSITIONS = [
    SampleShape(32, 10, 32 * 32, True),
    SampleShape(32, 20, 32 * 32, True),
    SampleShape(32, 8, 64 * 64, True),
]


@pytest.mark.parametrize("sample", POSITIONS, ids=str)
def test_samples_of_many_positions_are_streamed_where_programs_would_share_them(sample):
    assert isinstance(choose_forward(sample, 2, MULTIPROCESSORS), ForwardSampleStream)
    assert isinstance(choose_backward(sample, 2, MULTIPROCESSORS), BackwardSampleStream)


def test_what_a_program_holds_has_few_positions_or_no_lanes_for_its_columns_is_not_streamed():
    held = SampleShape(32, 8, 32 * 32, True)
    assert isinstance(choose_forward(held, 2, MULTIPROCESSORS), ForwardResidentBlock)
    few = SampleShape(32, 40, 16 * 16, True)
    assert isinstance(choose_forward(few, 4, MULTIPROCESSORS), ForwardCooperativeBlock)
    assert isinstance(choose_backward(few, 4, MULTIPROCESSORS), BackwardCooperativeBlock)
    more_columns_than_lanes = SampleShape(256, 18, 10 * 10, True)
    assert isinstance(choose_forward(more_columns_than_lanes, 2, MULTIPROCESSORS), ForwardCooperativeBlock)


@pytest.mark.parametrize("channels", [64, 320, 640, 960, 1280, 4096, 8 * 4096])
def test_streams_leave_few_lanes_without_columns(channels):
    sample = SampleShape(32, channels // 32, 1 << 14, channels_last=True)
    forward = choose_forward(sample, 2, MULTIPROCESSORS, can_wait=False)
    backward = choose_backward(sample, 2, MULTIPROCESSORS, can_wait=False)
    if channels > 4096:
        assert isinstance(forward, ForwardColumnSplit)
        assert isinstance(backward, BackwardColumnSplit)
    else:
        assert isinstance(forward, ForwardSampleStream)
        assert isinstance(backward, BackwardSampleStream)
        for lanes in (32 * forward.num_warps, 32 * backward.num_warps):
            assert 0 <= lanes % (channels // 8) <= lanes // 8


@pytest.mark.parametrize("hw", [1, 40, 4096])
def test_a_program_of_the_passes_that_do_not_wait_has_no_empty_piece(hw):
    contiguous = find_split_backward(SampleShape(4, 3, hw, channels_last=False), 2)
    piece = contiguous.count_range_positions(2) // contiguous.fragments
    assert contiguous.fragments <= -(-hw // piece)
    last = find_split_backward(SampleShape(4, 8, hw, channels_last=True), 2)
    assert last.fragments <= -(-hw // (last.chunks * last.count_tile_rows(8)))


def test_small_groups_go_several_to_a_program():
    config = choose_forward(SampleShape(8, 4, 16, channels_last=False), 2, MULTIPROCESSORS)
    assert isinstance(config, GroupNormForwardTile)
    assert config.groups_per_program > 1


@pytest.mark.parametrize("positions", [1, 64, 256, 1024])
def test_what_one_program_holds_is_not_shared(positions):
    sample = SampleShape(GROUPS, 16, positions, channels_last=True)
    assert isinstance(choose_forward(sample, 2, MULTIPROCESSORS), ForwardResidentBlock)


@pytest.mark.parametrize(("channels", "positions"), [(40, 256), (20, 1024)])
def test_one_program_reads_a_small_contiguous_group_twice_where_programs_may_not_wait(channels, positions):
    sample = SampleShape(GROUPS, channels, positions, channels_last=False)
    config = choose_backward(sample, 2, MULTIPROCESSORS, can_wait=False)
    assert isinstance(config, GroupNormBackwardSweep)
    # The lanes of a channel cover it exactly.
    assert config.chunks * (32 * config.num_warps // config.channels) * 8 == positions
    assert isinstance(choose_backward(sample, 2, MULTIPROCESSORS), GroupNormBackwardCooperative)
    larger = SampleShape(GROUPS, channels, 4 * positions, channels_last=False)
    assert isinstance(choose_backward(larger, 2, MULTIPROCESSORS, can_wait=False), GroupNormBackwardSplit)


@pytest.mark.parametrize("can_wait", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(10, 160), (16, 128), (20, 160), (40, 160), (80, 160)])
def test_one_program_reads_a_block_of_whole_groups_of_some_128_bytes_twice(channels, width, can_wait):
    sample = SampleShape(GROUPS, channels, 256, channels_last=True)
    config = choose_backward(sample, 2, MULTIPROCESSORS, can_wait)
    assert isinstance(config, BackwardBlockSweep)
    assert config.block_groups * channels * 2 == width
    larger = SampleShape(GROUPS, channels, 4096, channels_last=True)
    assert isinstance(choose_backward(larger, 2, MULTIPROCESSORS, can_wait), BackwardSampleStream)


def test_blocks_of_many_positions_are_narrower():
    config = choose_backward(SampleShape(GROUPS, 16, 1024, channels_last=True), 2, MULTIPROCESSORS)
    assert isinstance(config, BackwardBlockSweep)
    assert config.block_groups * 16 * 2 == 64


@pytest.mark.parametrize(("groups", "channels"), [(32, 3), (2, 8), (3, 1000)])
def test_no_program_reads_a_block_of_groups_narrower_than_16_bytes_or_of_few_or_many_columns(groups, channels):
    config = choose_backward(SampleShape(groups, channels, 16, channels_last=True), 2, MULTIPROCESSORS, False)
    assert not isinstance(config, BackwardBlockSweep)
