"""In how many parts channels-last samples are streamed, few of them and many."""

import fusednorm
import pytest
from fusednorm.devices.device_properties import H200
from fusednorm.ops.group_norm import config_tables as tables
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.channels_last.stream_partitions import StreamPartition, make_stream_partition
from fusednorm.ops.group_norm.forward_choice import find_stream_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.policy import batch_invariance

SAMPLE = SampleShape(32, 10, 4096, channels_last=True)
FORWARD = ForwardSampleStream(4, chunks=2, apply_chunks=8, splits=80)


def partition(
    samples: int, sample: SampleShape = SAMPLE, config: ForwardSampleStream | BackwardSampleStream = FORWARD
) -> StreamPartition:
    """On a device of 132 multiprocessors, as one that is absent is taken for."""
    return make_stream_partition(sample, 2, config, samples, H200)


def test_many_samples_are_streamed_as_the_configuration_says():
    many = partition(16)
    assert (many.splits, many.apply_chunks, many.has_extra_splits) == (80, 8, False)
    # 40 vectors of 8 channels: three positions on 128 lanes, eight lanes idle, two tiles a step.
    assert (
        many.vec,
        many.position_vectors,
        many.lanes,
        many.positions,
        many.step_positions,
        many.has_idle_lanes,
    ) == (8, 40, 128, 3, 6, True)


@pytest.mark.parametrize(("samples", "turns"), [(1, 2), (2, 4)])
def test_few_samples_are_cut_finer_in_parts_of_as_many_steps(samples, turns):
    few = partition(samples)
    steps = -(-SAMPLE.hw // few.step_positions)
    assert few.has_extra_splits
    assert few.splits == -(-steps // turns)
    assert samples * few.splits * 4 >= 132 * 7


def test_a_sample_has_no_more_parts_than_steps():
    tiny = partition(1, SampleShape(32, 10, 20, channels_last=True))
    assert tiny.splits == 4


def test_pieces_of_few_samples_are_small_enough_to_keep_the_device_busy():
    assert [
        partition(samples, config=ForwardSampleStream(4, 2, 64, 80)).apply_chunks for samples in (1, 2, 16, 64)
    ] == [
        4,
        8,
        64,
        64,
    ]


@pytest.mark.parametrize("samples", [1, 2, 5, 64])
def test_where_bits_may_not_depend_on_their_number_samples_are_cut_as_if_alone(samples, monkeypatch):
    monkeypatch.setattr(batch_invariance, "_required", False)
    alone = partition(1)
    fusednorm.require_batch_invariance(True)
    assert partition(samples) == alone


@pytest.mark.parametrize(("hw", "is_measured"), [(512, False), (513, True), (4096, True), (4097, False)])
def test_a_measured_stream_serves_samples_of_about_its_size(hw, is_measured):
    measured = next(config for columns, most, config in tables.FORWARD_STREAM[2] if (columns, most) == (320, 4096))
    assert (find_stream_forward(SampleShape(32, 10, hw, True), 2) == measured) is is_measured
