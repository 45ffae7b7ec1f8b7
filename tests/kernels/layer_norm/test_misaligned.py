"""Tensors that start between multiples of 16 bytes: what a thread has of them makes no full tree of equal sets."""

import pytest
import torch
from fusednorm.checks import Epilogue
from fusednorm.launch.launch import has_lane_a_thread
from fusednorm.ops.group_norm.contiguous.forward import cooperative as groups_cooperative
from fusednorm.ops.group_norm.contiguous.forward import resident as groups_resident
from fusednorm.ops.group_norm.plan import plan_forward as plan_groups
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.ops.layer_norm.call import ForwardCall
from fusednorm.ops.layer_norm.choice import plan_forward as plan_rows
from fusednorm.ops.layer_norm.forward.cooperative import ForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import ForwardResident
from fusednorm.ops.layer_norm.forward.split import ForwardSplit
from fusednorm.results import Forward

ALIGNED, MISALIGNED = 0, 3
"""Elements before a tensor."""


def tensor(before, *shape):
    memory = torch.zeros(8 + torch.Size(shape).numel(), dtype=torch.bfloat16)
    start = -memory.data_ptr() % 16 // 2 + before
    return memory[start:][: torch.Size(shape).numel()].view(shape)


def test_accesses_of_16_bytes_need_width_and_place():
    x = tensor(ALIGNED, 64)
    assert has_lane_a_thread(16, x, None)
    assert not has_lane_a_thread(8, x)
    assert not has_lane_a_thread(16, x, tensor(MISALIGNED, 64))


def take_all_as_whole(launches):
    """Whether the first launch's chunks are all known to be whole, which lets their moments be merged as equals."""
    return launches[0].options["FULL"] == launches[0].options["CHUNKS"]


@pytest.mark.parametrize(
    ("cols", "config"),
    [
        (4096, ForwardResident(4, 4, 4, 2)),
        (8192, ForwardCooperative(4, 4, 5, 2, 1)),
        (1 << 20, ForwardSplit(4, 8, 2, 4, 16)),
    ],
)
def test_rows(cols, config):
    def plan(x_before, y_before, x_stride=cols):
        x = tensor(x_before, 2, x_stride)[:, :cols]
        out = Forward(tensor(y_before, 2, cols))
        return plan_rows(ForwardCall(x=x, eps=1e-5, out=out), config)

    assert take_all_as_whole(plan(ALIGNED, ALIGNED))
    assert not take_all_as_whole(plan(MISALIGNED, MISALIGNED))
    if isinstance(config, ForwardSplit):
        # The next row starts anywhere, too; shorter rows are taken without merging where accesses are narrow.
        assert not take_all_as_whole(plan(ALIGNED, ALIGNED, cols + 1))
    else:
        assert not take_all_as_whole(plan(ALIGNED, MISALIGNED))


@pytest.mark.parametrize(
    "config", [groups_resident.ForwardResident(4, 2), groups_cooperative.ForwardCooperative(2, 4, 4, 1, 1)]
)
@pytest.mark.parametrize(("x_before", "y_before"), [(MISALIGNED, ALIGNED), (ALIGNED, MISALIGNED)])
def test_contiguous_groups(config, x_before, y_before):
    sample = Sample(2, 4, 2048, False)

    def plan(x_before, y_before):
        out = Forward(tensor(y_before, 1, 8, 2048))
        return plan_groups(
            tensor(x_before, 1, 8, 2048), sample, None, None, 1e-5, None, Epilogue("none"), out, config
        )

    assert take_all_as_whole(plan(ALIGNED, ALIGNED))
    assert not take_all_as_whole(plan(x_before, y_before))


def test_whole_slabs_of_groups_with_narrow_accesses_are_masked_like_the_others():
    def lane_a_thread(channels):
        sample = Sample(2, channels, 1001, False)
        shape = (1, sample.c, sample.hw)
        out = Forward(tensor(ALIGNED, *shape))
        config = groups_cooperative.ForwardCooperative(1, 4, 4, 1, 1)
        (launch,) = plan_groups(
            tensor(ALIGNED, *shape), sample, None, None, 1e-5, None, Epilogue("none"), out, config
        )
        return launch.options["LANE_A_THREAD"]

    # Samples of 4 * 2 * 1001 elements are whole 16 bytes, those of 3 * 2 * 1001 are not.
    assert lane_a_thread(4)
    assert not lane_a_thread(3)
